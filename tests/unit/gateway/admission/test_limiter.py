from dataclasses import replace

from gateway.admission.limiter import ConcurrencyLimiter
from gateway.registry import Instance, InstanceState
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats
from kvcontrol.core.ids import Epoch, InstanceId
from kvcontrol.core.roles import EngineRole
from tests.support.scripted_engine import IDENTITY

PLAIN = Instance(id=InstanceId("a"), url="http://a", state=InstanceState.HEALTHY, reason="")


def reporting(*, waiting: int = 0, batch: int = 8) -> Instance:
    stats = InstanceStats(
        epoch=Epoch("e"),
        engine="scripted",
        engine_version="1",
        device="cpu",
        started_at_s=0.0,
        context_length_tokens=8192,
        identity=IDENTITY,
        events=EventsInfo(endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:2", seq=-1),
        tiers={},
        load=LoadStats(running=batch, waiting=waiting, max_batch_size=batch),
        prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
    )
    return replace(PLAIN, stats=stats)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def limiter(clock: Clock, most: int = 100) -> ConcurrencyLimiter:
    return ConcurrencyLimiter(most=most, slow_s=5.0, clock=clock)


def test_it_starts_a_little_above_the_batch_that_an_engine_reports() -> None:
    limits = limiter(Clock())
    assert limits.limit(reporting(batch=8)) == 10
    assert limits.free_places(reporting(batch=8), 7)[1] == 3
    assert limits.free_places(reporting(batch=8), 12)[1] == 0


def test_it_grows_only_while_it_is_in_use_and_answers_come_in_time() -> None:
    limits, engine = limiter(Clock()), reporting()
    limits.answered(engine, after_s=0.1, in_flight=2)
    assert limits.limit(engine) == 10
    for _ in range(10):
        limits.answered(engine, after_s=0.1, in_flight=limits.limit(engine))
    assert limits.limit(engine) == 20
    for _ in range(500):
        limits.answered(engine, after_s=0.1, in_flight=limits.limit(engine))
    assert limits.limit(engine) == 100


def test_an_engine_whose_own_line_is_long_gets_less_down_to_its_batch() -> None:
    clock = Clock()
    limits = limiter(clock)
    busy = reporting(waiting=5)
    for _ in range(50):
        limits.answered(reporting(), after_s=0.1, in_flight=limits.limit(busy))
    for _ in range(60):
        clock.now_s += 1.0
        limits.watch((busy,))
        limits.answered(busy, after_s=0.1, in_flight=limits.limit(busy))
    assert limits.limit(busy) == 8


def test_overload_counts_once_a_second_and_leaves_one() -> None:
    clock = Clock()
    limits = limiter(clock)
    for _ in range(5):
        limits.overloaded(PLAIN)
    assert limits.limit(PLAIN) == 70
    clock.now_s = 1.0
    limits.answered(PLAIN, after_s=6.0, in_flight=1)  # a late first byte is overload, too
    assert limits.limit(PLAIN) == 49
    for second in range(2, 40):
        clock.now_s = float(second)
        limits.overloaded(PLAIN)
    assert limits.limit(PLAIN) == 1


def test_overload_leaves_one_more_than_the_answers_that_are_under_way() -> None:
    clock = Clock()
    limits = limiter(clock)
    for second in range(1, 20):
        clock.now_s = float(second)
        limits.overloaded(PLAIN, answering=50)
    assert limits.limit(PLAIN) == 51
    assert limits.free_places(PLAIN, 50)[1] == 1, "so that one that goes well can be seen"
    clock.now_s = 20.0
    limits.answered(PLAIN, after_s=6.0, in_flight=51, answering=30)
    assert limits.limit(PLAIN) == 35
    limits.answered(PLAIN, after_s=0.1, in_flight=35, answering=34)
    assert limits.limit(PLAIN) == 36
    for second in range(21, 60):
        clock.now_s = float(second)
        limits.overloaded(PLAIN, answering=1000)
    assert limits.limit(PLAIN) == 36, "and never more than there was"


def test_an_instance_that_was_away_starts_anew() -> None:
    limits = limiter(Clock())
    limits.overloaded(PLAIN)
    limits.watch((replace(PLAIN, state=InstanceState.UNHEALTHY),))
    assert limits.limit(PLAIN) == 100
    limits.watch(())
    assert limits._limits == {}


def test_the_highest_class_has_places_of_its_own_and_the_lowest_leaves_as_many_to_others() -> None:
    limits, engine = limiter(Clock(), most=20), reporting(batch=8)
    assert limits.free_places(engine, 8) == (2, 2, 0)
    assert limits.free_places(engine, 15) == (2, 0, 0), "whatever else it has"
    assert limits.free_places(replace(engine, foreign_requests=99), 15, urgent=1) == (1, 0, 0)
    assert limits.free_places(engine, 10, urgent=2) == (0, 0, 0)
    assert limits.free_places(engine, 19) == (1, 0, 0), "more than the setting allows is for none"
    for _ in range(4):
        limits.overloaded(engine)
    assert limits.free_places(engine, 7) == (0, 0, 0), "what an overloaded one may not have is for none"
    unreported = replace(PLAIN, id=InstanceId("plain"))
    assert limits.free_places(unreported, 19) == (1, 1, 1), "nobody knows what waits there"
    assert limits.free_places(unreported, 20) == (0, 0, 0)


def test_decode_instances_have_a_limit_of_their_own() -> None:
    limits = ConcurrencyLimiter(most=100, slow_s=5.0, clock=Clock(), most_decoding=4)
    decoding = replace(reporting(), id=InstanceId("d"), role=EngineRole.DECODE)
    assert limits.limit(decoding) == 4
    assert limits.free_places(decoding, 3) == (1, 1, 1)
    assert limits.free_places(decoding, 4) == (0, 0, 0)
    assert limits.limit(reporting()) == 10
