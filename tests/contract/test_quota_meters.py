"""What every quota meter must do, in this process and over a real Redis, on a clock that the test holds."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from gateway.admission.quota import Demand, Dimension, Exceeded, Granted, LocalQuotaMeter, QuotaMeter, QuotaUsage
from gateway.admission.redis_quota import RedisQuotaMeter
from gateway.limits import TenantLimits
from gateway.types import TenantId
from tests.support.databases import Server, redis_server

ACME, OTHER = TenantId("acme"), TenantId("other")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.25

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    with redis_server() as server:
        yield server.port


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Meters:
    """Opens meters that count together: the same one in one process, several over Redis."""

    def __init__(self, make: Callable[[], QuotaMeter], *, shared: bool) -> None:
        self._make = make
        self.shared = shared
        self.made = [make()]

    def another(self) -> QuotaMeter:
        if self.shared:
            self.made.append(self._make())
        return self.made[-1]

    async def written(self) -> None:
        """Wait until what was settled is counted."""
        for meter in self.made:
            if isinstance(meter, RedisQuotaMeter):
                await meter.flush()


@pytest.fixture(params=["local", "redis"])
async def meters(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[Meters]:
    if request.param == "local":
        yield Meters(lambda: LocalQuotaMeter(clock), shared=False)
        return
    url = f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0"
    prefix = f"test-{request.node.name}"
    meters = Meters(lambda: RedisQuotaMeter(url, prefix=prefix, clock=clock), shared=True)
    yield meters
    for meter in meters.made:
        await meter.close()


@pytest.fixture
def meter(meters: Meters) -> QuotaMeter:
    return meters.made[0]


def one(tokens: int) -> Demand:
    return Demand(requests=1, tokens=tokens, places=1)


async def granted(meter: QuotaMeter, limits: TenantLimits, tokens: int = 1, tenant: TenantId = ACME) -> Granted:
    decision = await meter.reserve(tenant, limits, one(tokens))
    assert isinstance(decision, Granted)
    return decision


async def exceeded(meter: QuotaMeter, limits: TenantLimits, tokens: int = 1) -> Exceeded:
    decision = await meter.reserve(ACME, limits, one(tokens))
    assert isinstance(decision, Exceeded)
    return decision


@pytest.mark.parametrize("replicas", [1, 3])
async def test_of_a_hundred_at_once_exactly_ten_are_let_in(meters: Meters, replicas: int) -> None:
    limits = TenantLimits(requests_per_min=10)
    all_of_them = [meters.made[0], *(meters.another() for _ in range(replicas - 1))]
    decisions = await asyncio.gather(
        *(all_of_them[number % replicas].reserve(ACME, limits, one(7)) for number in range(100))
    )
    assert sum(isinstance(each, Granted) for each in decisions) == 10
    assert await meters.made[0].usage(ACME) == QuotaUsage(requests=10, tokens=70, running=10)


async def test_a_refusal_takes_nothing_and_says_when_to_come_again(meter: QuotaMeter, clock: Clock) -> None:
    limits = TenantLimits(requests_per_min=1)
    await granted(meter, limits)
    clock.now_s += 20
    refused = await exceeded(meter, limits)
    assert (refused.dimension, refused.limit, refused.retry_after_s) == (Dimension.REQUESTS, 1, 41)
    assert refused.requests is not None
    assert (refused.requests.remaining, refused.tokens) == (0, None)
    clock.now_s += refused.retry_after_s
    await granted(meter, limits)


async def test_no_sixty_seconds_see_more_than_the_limit(meter: QuotaMeter, clock: Clock) -> None:
    limits, times = TenantLimits(requests_per_min=6), []
    for _ in range(400):
        if isinstance(decision := await meter.reserve(ACME, limits, one(1)), Granted):
            times.append(clock.now_s)
            meter.settle(decision.reservation, requests=1, tokens=1)
        clock.now_s += 0.7
    assert all(sum(start <= each < start + 60 for each in times) <= 6 for start in times)
    assert len(times) >= 6 * 4


async def test_tokens_are_reserved_and_settled_by_what_was_really_used(meters: Meters, meter: QuotaMeter) -> None:
    limits = TenantLimits(tokens_per_min=100)
    first = await granted(meter, limits, 80)
    assert first.tokens is not None
    assert (first.tokens.limit, first.tokens.remaining) == (100, 20)
    assert (await exceeded(meter, limits, 21)).dimension is Dimension.TOKENS
    meter.settle(first.reservation, requests=1, tokens=30)
    await meters.written()
    second = await granted(meter, limits, 70)
    assert second.tokens is not None
    assert second.tokens.remaining == 0
    meter.settle(second.reservation, requests=1, tokens=90)  # more than reserved: a debt
    await meters.written()
    assert (await meter.usage(ACME)).tokens == 120
    await exceeded(meter, limits, 1)


async def test_a_refund_leaves_no_trace(meters: Meters, meter: QuotaMeter) -> None:
    limits = TenantLimits(requests_per_min=1, tokens_per_min=10, concurrency=1)
    for _ in range(20):
        taken = await granted(meter, limits, 10)
        meter.settle(taken.reservation, requests=0, tokens=0)
        await meters.written()
    assert await meter.usage(ACME) == QuotaUsage(requests=0, tokens=0, running=0)


async def test_concurrency_is_given_back_at_the_end(meters: Meters, meter: QuotaMeter) -> None:
    limits = TenantLimits(concurrency=2)
    held = [await granted(meter, limits) for _ in range(2)]
    assert (await exceeded(meter, limits)).dimension is Dimension.CONCURRENCY
    meter.settle(held[0].reservation, requests=1, tokens=1)
    await meters.written()
    await granted(meter, limits)


async def test_a_list_of_prompts_takes_a_request_for_each_and_a_place_for_each_answer(
    meters: Meters, meter: QuotaMeter
) -> None:
    limits = TenantLimits(requests_per_min=5, concurrency=6)
    taken = await meter.reserve(ACME, limits, Demand(requests=3, tokens=30, places=6))
    assert isinstance(taken, Granted)
    assert await meter.usage(ACME) == QuotaUsage(requests=3, tokens=30, running=6)
    assert (await exceeded(meter, limits)).dimension is Dimension.CONCURRENCY
    meter.settle(taken.reservation, requests=3, tokens=12)
    await meters.written()
    assert await meter.usage(ACME) == QuotaUsage(requests=3, tokens=12, running=0)
    refused = await meter.reserve(ACME, limits, Demand(requests=3, tokens=1, places=3))
    assert isinstance(refused, Exceeded)
    assert refused.dimension is Dimension.REQUESTS


async def test_the_places_of_a_list_last_as_long_as_it_runs(meters: Meters, meter: QuotaMeter, clock: Clock) -> None:
    taken = await meter.reserve(ACME, TenantLimits(concurrency=9), Demand(requests=1, tokens=1, places=4))
    assert isinstance(taken, Granted)
    clock.now_s += 20
    if isinstance(meter, RedisQuotaMeter):
        await meter._renew_all()
    clock.now_s += 20
    assert (await meter.usage(ACME)).running == 4
    meter.settle(taken.reservation, requests=1, tokens=1)
    await meters.written()
    assert (await meter.usage(ACME)).running == 0


async def test_a_reservation_takes_the_place_of_an_earlier_one_in_one_step(meters: Meters, meter: QuotaMeter) -> None:
    limits = TenantLimits(requests_per_min=2, tokens_per_min=100, concurrency=2)
    first = await meter.reserve(ACME, limits, Demand(requests=1, tokens=0, places=1))
    assert isinstance(first, Granted)
    second = await meter.reserve(ACME, limits, Demand(requests=2, tokens=100, places=2), instead_of=first.reservation)
    assert isinstance(second, Granted)
    assert await meter.usage(ACME) == QuotaUsage(requests=2, tokens=100, running=2)
    third = await meter.reserve(ACME, limits, Demand(requests=2, tokens=101, places=1), instead_of=second.reservation)
    assert isinstance(third, Exceeded)
    await meters.written()
    assert await meter.usage(ACME) == QuotaUsage(requests=0, tokens=0, running=0)


async def test_what_is_settled_after_its_minute_changes_nothing(
    meters: Meters, meter: QuotaMeter, clock: Clock
) -> None:
    limits = TenantLimits(tokens_per_min=100)
    old = await granted(meter, limits, 100)
    clock.now_s += 25
    if isinstance(meter, RedisQuotaMeter):
        await meter._renew_all()
    clock.now_s += 45
    new = await granted(meter, limits, 100)
    meter.settle(old.reservation, requests=1, tokens=0)
    await meters.written()
    assert (await meter.usage(ACME)).tokens == 100
    meter.settle(new.reservation, requests=1, tokens=60)
    await meters.written()
    assert (await meter.usage(ACME)).tokens == 60


async def test_tenants_do_not_see_each_other(meter: QuotaMeter) -> None:
    limits = TenantLimits(requests_per_min=1)
    await granted(meter, limits)
    await granted(meter, limits, tenant=OTHER)
    await exceeded(meter, limits)


async def test_a_changed_limit_counts_at_once(meter: QuotaMeter) -> None:
    await granted(meter, TenantLimits(requests_per_min=5))
    await exceeded(meter, TenantLimits(requests_per_min=1))
    await granted(meter, TenantLimits(requests_per_min=2))


async def test_a_killed_gateway_gives_its_places_back_and_a_live_one_keeps_them(redis_port: int, clock: Clock) -> None:
    url = f"redis://127.0.0.1:{redis_port}/0"
    killed, live = (RedisQuotaMeter(url, prefix="lease", clock=clock) for _ in range(2))
    limits = TenantLimits(concurrency=2)
    await granted(killed, limits)
    mine = await granted(live, limits)
    clock.now_s += 20
    await live._renew_all()
    clock.now_s += 20
    assert (await live.usage(ACME)).running == 1
    live.settle(mine.reservation, requests=1, tokens=1)
    await live.close()
    await killed._client.aclose()


async def test_settlements_wait_while_redis_is_away(clock: Clock) -> None:
    server: Server
    with redis_server() as server:
        meter = RedisQuotaMeter(f"redis://127.0.0.1:{server.port}/0", clock=clock)
        limits = TenantLimits(requests_per_min=5)
        taken = await granted(meter, limits)
        meter.settle(taken.reservation, requests=0, tokens=0)
        server.process.send_signal(19)  # stopped: connections stay, nothing answers
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await meter.flush()
        server.process.send_signal(18)
        await meter.flush()
        assert await meter.usage(ACME) == QuotaUsage(requests=0, tokens=0, running=0)
        await meter.close()
