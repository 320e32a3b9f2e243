"""Turns under races: clients that leave at any moment, instances that come and go, deadlines, quotas."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from time import monotonic

import msgspec
import pytest

from gateway.admission import (
    AdmissionController,
    AdmissionRequest,
    ConcurrencyLimiter,
    LocalQuotaMeter,
    QueueRules,
)
from gateway.errors import InvalidRequestError, NoInstanceError, NotFoundError, RateLimitedError
from gateway.limits import SloClass, TenantLimits
from gateway.registry import InstanceSpec, LoadTracker, Model, ProbeResult, Registry
from gateway.registry.checks import CheckRules
from gateway.types import Tenant, TenantId, Usage
from kvcontrol.core.control import InstanceStats, LoadStats
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.priority import Priority
from tests.unit.gateway.admission.test_limiter import reporting

USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=0)


class Meter:
    def __init__(self) -> None:
        self.sheds: Counter[str] = Counter()
        self.waits = 0

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.waits += 1

    def shed(self, reason: str) -> None:
        self.sheds[reason] += 1


class House:
    """A controller over instances that the test owns; each takes at most ``most`` requests."""

    def __init__(  # noqa: PLR0913 - a house has rooms
        self,
        *,
        instances: int = 2,
        most: int = 2,
        bound: int = 100,
        deadline_s: float = 30.0,
        ageing_s: float = 5.0,
        stats: InstanceStats | None = None,
    ) -> None:
        self.stats = stats
        names = [InstanceId(f"i{number}") for number in range(instances)]
        self.registry = Registry(
            (InstanceSpec(id=name, url=f"http://{name}") for name in names), rules=CheckRules(unhealthy_after=1)
        )
        self.load = LoadTracker()
        self.meter = Meter()
        self.quotas = LocalQuotaMeter(monotonic)
        self.fullest = 0
        self.served_as: list[Priority] = []
        self.admission = AdmissionController(
            registry=self.registry,
            load=self.load,
            quotas=self.quotas,
            limiter=ConcurrencyLimiter(most=most, slow_s=60.0, clock=monotonic),
            rules=QueueRules(bound=bound, ageing_s=ageing_s, deadlines_s=dict.fromkeys(SloClass, deadline_s)),
            meter=self.meter,
            clock=monotonic,
        )
        for name in names:
            self.up(name)

    def up(self, name: InstanceId) -> None:
        probe = ProbeResult(models=(Model(id="m", card={}),), stats=self.stats, stats_problem=None, in_flight=0)
        self.registry.checks.succeeded(name, probe)

    def down(self, name: InstanceId) -> None:
        self.registry.checks.connection_failed(name, "gone")

    async def request(
        self, tenant: str = "t", *, hold_s: float = 0.0, limits: TenantLimits | None = None, answers: int = 1
    ) -> None:
        """One request from its arrival to its end, as the pipeline does it."""
        who = Tenant(id=TenantId(tenant), salt="s", limits=limits or TenantLimits())
        ask = AdmissionRequest(
            tenant=who, model="m", prompt_tokens=10, output_tokens=5, expected_output_tokens=5, answers=answers
        )
        with await self.admission.admit(ask) as entry:
            self.served_as.append(entry.served_as)
            chosen = min(entry.instances, key=lambda each: self.load.of(each.id).in_flight)
            with self.load.placed(chosen.id, uncached_tokens=10, cold=True, places=answers):
                entry.placed(chosen.id)
                self.fullest = max(self.fullest, self.load.of(chosen.id).in_flight)
                await asyncio.sleep(hold_s)
                entry.began()
                await asyncio.sleep(hold_s)
            entry.settle(200, USAGE)

    def at_rest(self) -> None:
        assert self.admission.waiting == 0
        assert not self.admission.capacity.urgent._counts
        assert all(each.unplaced == 0 and not each.waiters for each in self.admission._queues.values())
        assert all(self.load.of(each.id).in_flight == 0 for each in self.registry.all())


@contextlib.asynccontextmanager
async def looping(house: House) -> AsyncIterator[None]:
    task = asyncio.create_task(house.admission.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_or_given_twice_however_clients_and_instances_behave(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    house = House(bound=20, deadline_s=0.3)
    limits = [TenantLimits(priority=priority, concurrency=8, tokens_per_min=10**9) for priority in Priority]
    ended: Counter[str] = Counter()

    async def client(number: int) -> None:
        await asyncio.sleep(chance.random() * 0.5)
        task = asyncio.create_task(
            house.request(f"t{number % 5}", hold_s=chance.random() * 0.02, limits=chance.choice(limits))
        )
        if chance.random() < 0.3:
            await asyncio.sleep(chance.choice([0.0, 0.0, chance.random() * 0.1]))
            task.cancel()
        try:
            await task
            ended["served"] += 1
        except asyncio.CancelledError:
            ended["left"] += 1
        except (RateLimitedError, NoInstanceError) as error:
            ended[error.reason] += 1

    async def flapping() -> None:
        while True:
            name = InstanceId(f"i{chance.randrange(2)}")
            house.down(name)
            await asyncio.sleep(chance.random() * 0.05)
            house.up(name)
            await asyncio.sleep(chance.random() * 0.05)

    async with looping(house):
        flaps = asyncio.create_task(flapping())
        async with asyncio.timeout(60):
            await asyncio.gather(*(client(number) for number in range(300)))
        flaps.cancel()
        house.at_rest()
    assert sum(ended.values()) == 300
    assert ended["served"]
    assert house.fullest <= 4  # a turn that was given goes to another instance when its own has gone
    for number in range(5):
        assert (await house.quotas.usage(TenantId(f"t{number}"))).running == 0


async def test_a_turn_that_its_client_no_longer_wants_goes_to_the_next() -> None:
    """The client leaves in the very step in which its turn is given."""
    house = House(instances=1, most=1)
    async with looping(house):
        first = asyncio.create_task(house.request(hold_s=0.02))
        await asyncio.sleep(0.001)
        second, third = (asyncio.create_task(house.request()) for _ in range(2))
        await asyncio.sleep(0.001)
        first.add_done_callback(lambda _: second.cancel())
        async with asyncio.timeout(10):
            await first
            await third
            with pytest.raises(asyncio.CancelledError):
                await second
        house.at_rest()


async def test_a_request_for_several_answers_takes_as_many_places_until_it_ends() -> None:
    house = House(instances=1, most=4)
    async with looping(house), asyncio.timeout(30):
        several = asyncio.create_task(house.request(hold_s=30.0, answers=3))
        one = asyncio.create_task(house.request(hold_s=30.0))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(house.request(answers=answers)) for answers in (1, 3)]
        await asyncio.sleep(0.25)  # longer than it takes to look again
        assert house.admission.waiting == 2
        assert house.fullest == 4
        several.cancel()
        await asyncio.gather(*waiting)
        one.cancel()
        await asyncio.gather(several, one, return_exceptions=True)
        house.at_rest()


async def test_one_that_needs_more_places_than_there_are_goes_when_one_is_free() -> None:
    house = House(instances=1, most=2)
    async with looping(house), asyncio.timeout(30):
        many = asyncio.create_task(house.request(hold_s=30.0, answers=9))
        await asyncio.sleep(0)
        other = asyncio.create_task(house.request())
        await asyncio.sleep(0.25)
        assert (house.fullest, house.admission.waiting) == (9, 1)
        many.cancel()
        await other
        await asyncio.gather(many, return_exceptions=True)
        house.at_rest()


async def test_one_that_its_quota_can_never_let_in_is_a_400() -> None:
    house = House()
    for limits in (TenantLimits(concurrency=2), TenantLimits(concurrency=2, tokens_per_min=1000)):
        with pytest.raises(InvalidRequestError, match="3 answers, more than the 2 requests at the same time"):
            await house.request(limits=limits, answers=3)
    house.at_rest()


async def test_room_that_an_instance_brings_is_used() -> None:
    house = House(instances=2, most=1)
    house.down(InstanceId("i1"))
    async with looping(house):
        long = asyncio.create_task(house.request(hold_s=5.0))
        await asyncio.sleep(0.001)
        waiting = asyncio.create_task(house.request())
        await asyncio.sleep(0.05)
        assert house.admission.waiting == 1
        house.up(InstanceId("i1"))
        async with asyncio.timeout(10):
            await waiting
        long.cancel()


async def test_without_an_instance_it_is_a_503_and_an_unknown_model_a_404() -> None:
    house = House(instances=1, deadline_s=0.05)
    held = asyncio.create_task(house.request(hold_s=5.0))
    held_too = asyncio.create_task(house.request(hold_s=5.0))
    await asyncio.sleep(0.001)
    waiting = asyncio.create_task(house.request())
    await asyncio.sleep(0.001)
    house.down(InstanceId("i0"))
    with pytest.raises(NoInstanceError):
        await waiting  # its deadline comes while nobody is there
    with pytest.raises(NoInstanceError):
        await house.request()
    for each in (held, held_too):
        each.cancel()
    house.up(InstanceId("i0"))
    with pytest.raises(NotFoundError):
        house.admission.candidates("other")


async def on_trial(house: House) -> list[asyncio.Task[None]]:
    """The only instance has come back, its trial is under way, and three more requests have come."""
    house.down(InstanceId("i0"))
    house.up(InstanceId("i0"))
    house.registry.breakers.picked(InstanceId("i0"))
    waiting = [asyncio.create_task(house.request()) for _ in range(3)]
    await asyncio.sleep(0.25)  # longer than it takes to look again
    assert house.admission.waiting == 3
    assert house.admission.candidates("m") == ()
    with pytest.raises(NoInstanceError):
        house.admission.ready("m")
    return waiting


async def test_requests_wait_for_the_outcome_of_a_trial_and_go_on_when_it_is_good() -> None:
    house = House(instances=1, most=8)
    async with looping(house), asyncio.timeout(30):
        waiting = await on_trial(house)
        house.registry.breakers.answered(InstanceId("i0"))
        await asyncio.gather(*waiting)
        house.at_rest()


async def test_requests_that_waited_for_a_trial_that_fails_are_told_when_to_come_back() -> None:
    house = House(instances=1)
    async with looping(house), asyncio.timeout(30):
        waiting = await on_trial(house)
        house.registry.breakers.failed(InstanceId("i0"), "cut")
        for each in waiting:
            with pytest.raises(NoInstanceError) as refusal:
                await each
            assert refusal.value.retry_after_s
        house.at_rest()
        assert house.meter.sheds == {"no_instance": 4}


async def test_requests_that_waited_for_a_trial_are_sent_away_when_its_instance_goes() -> None:
    house = House(instances=1)
    async with looping(house), asyncio.timeout(30):
        waiting = await on_trial(house)
        house.down(InstanceId("i0"))
        for each in waiting:
            with pytest.raises(NoInstanceError):
                await each
        house.at_rest()


async def test_one_that_waits_for_a_trial_may_leave_and_waits_no_longer_than_its_class_does() -> None:
    house = House(instances=1, deadline_s=0.5)
    async with looping(house), asyncio.timeout(30):
        first, *others = await on_trial(house)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        for each in others:
            with pytest.raises(NoInstanceError):
                await each
        house.at_rest()


async def test_an_instance_on_probation_is_given_one_request_however_many_wait() -> None:
    house = House(instances=1, most=8)
    house.down(InstanceId("i0"))
    house.up(InstanceId("i0"))
    most = 0

    async def one() -> None:
        nonlocal most
        who = Tenant(id=TenantId("t"), salt="s", limits=TenantLimits())
        ask = AdmissionRequest(tenant=who, model="m", prompt_tokens=10, output_tokens=5, expected_output_tokens=5)
        with await house.admission.admit(ask) as entry:
            house.registry.breakers.picked(entry.instances[0].id)
            with house.load.placed(entry.instances[0].id, uncached_tokens=10, cold=True):
                entry.placed(entry.instances[0].id)
                if house.registry.available.on_probation(InstanceId("i0")):
                    most = max(most, house.load.in_flight(InstanceId("i0")))
                await asyncio.sleep(0.15)
                house.registry.breakers.answered(InstanceId("i0"))

    async with looping(house), asyncio.timeout(30):
        await asyncio.gather(*(one() for _ in range(12)))
        house.at_rest()
    assert most == 1


async def test_one_that_others_have_failed_goes_rather_to_one_on_trial_than_to_nobody() -> None:
    house = House(instances=2)
    for name in ("i0", "i1"):
        house.down(InstanceId(name))
        house.up(InstanceId(name))
        house.registry.breakers.picked(InstanceId(name))
    assert house.admission.usable("m") == ()
    assert [each.id for each in house.admission.untried("m", {InstanceId("i0")})] == ["i1"]
    house.registry.breakers.failed(InstanceId("i1"), "cut")
    assert house.admission.untried("m", {InstanceId("i0")}) == ()


def served_by_two_at_a_time(**said: float) -> House:
    """One instance with a batch of two: three ordinary requests may be there, two of low claim, and one of high besides
    that has no answer yet.
    """
    load = LoadStats(running=0, waiting=0, max_batch_size=2)
    return House(instances=1, most=100, stats=msgspec.structs.replace(reporting().stats, load=load), **said)  # type: ignore[arg-type]


async def coming(house: House, count: int, priority: Priority) -> list[asyncio.Task[None]]:
    """So many requests of a class, that hold what they are given, once they have come."""
    limits = TenantLimits(priority=priority)
    tasks = [asyncio.create_task(house.request(priority.value, hold_s=300.0, limits=limits)) for _ in range(count)]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def leave(tasks: list[asyncio.Task[None]]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_important_request_reaches_the_engine_although_64_others_wait_for_a_turn() -> None:
    house = served_by_two_at_a_time()
    ordinary = await coming(house, 3 + 64, Priority.NORMAL)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (3, 64)
    important = await coming(house, 1, Priority.HIGH)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (4, 64)
    second = await coming(house, 1, Priority.HIGH)
    assert house.admission.waiting == 65, "there is one already that has no answer yet"
    await leave(important)
    assert house.admission.waiting == 64, "the next turn is the important one's"
    await leave([*second, *ordinary])
    house.at_rest()


async def test_an_important_request_reaches_an_engine_that_has_more_than_its_limit_of_others() -> None:
    house = served_by_two_at_a_time()
    ordinary = await coming(house, 3, Priority.NORMAL)
    load = LoadStats(running=2, waiting=9, max_batch_size=2)  # what another gateway sent came to light
    house.stats = msgspec.structs.replace(reporting().stats, load=load)
    house.up(InstanceId("i0"))
    important = await coming(house, 2, Priority.HIGH)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (4, 1)
    await leave([*important, *ordinary])
    house.at_rest()


async def test_a_request_of_low_claim_leaves_a_place_in_the_engines_line_to_others() -> None:
    house = served_by_two_at_a_time()
    low = await coming(house, 5, Priority.LOW)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (2, 3)
    ordinary = await coming(house, 1, Priority.NORMAL)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (3, 3)
    await leave([*low, *ordinary])
    house.at_rest()


async def test_who_has_waited_long_is_served_as_an_important_one_and_has_its_place() -> None:
    house = served_by_two_at_a_time(ageing_s=0.05)
    held = await coming(house, 3, Priority.NORMAL)
    assert house.served_as == [Priority.NORMAL] * 3
    waiting = await coming(house, 1, Priority.NORMAL)
    assert house.admission.waiting == 1
    async with looping(house), asyncio.timeout(60):
        while house.admission.waiting:  # until it has risen
            await asyncio.sleep(0.01)
    assert house.served_as[3:] == [Priority.HIGH]
    important = await coming(house, 1, Priority.HIGH)
    assert (house.load.in_flight(InstanceId("i0")), house.admission.waiting) == (4, 1), "the place is taken"
    low = await coming(house, 1, Priority.LOW)
    await leave(waiting)
    assert house.served_as[4:] == [Priority.HIGH]
    async with looping(house), asyncio.timeout(60):
        await asyncio.sleep(0.15)  # the low one has risen twice
        await leave(important)
        while house.admission.waiting:
            await asyncio.sleep(0.01)
    assert house.served_as[5:] == [Priority.HIGH]
    await leave([*held, *low])
    house.at_rest()


async def test_tenants_share_what_there_is_as_their_weights_say() -> None:
    house = House(instances=1, most=1, bound=1000)
    served: list[str] = []

    async def one(tenant: str, weight: float) -> None:
        await house.request(tenant, limits=TenantLimits(weight=weight))
        served.append(tenant)

    async with looping(house), asyncio.timeout(30):
        held = asyncio.create_task(house.request(hold_s=0.05))
        await asyncio.sleep(0.001)
        await asyncio.gather(*(one(name, weight) for name, weight in [("small", 1.0)] * 60 + [("big", 3.0)] * 60))
        await held
    assert Counter(served[:40]) == {"big": 30, "small": 10}
    assert house.fullest == 1
    house.at_rest()
