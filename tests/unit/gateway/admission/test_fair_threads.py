"""Long work in threads: nobody waits for another tenant's, nothing is lost, and a thread is left for short work."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from gateway.admission.fair_threads import LONG_BYTES, FairThreads
from gateway.errors import RateLimitedError
from gateway.http.body_memory import TIMES, BodyMemory
from gateway.limits import TenantLimits
from gateway.types import Tenant, TenantId
from kvcontrol.core.priority import Priority

LIMIT_S = 30.0
MEMORY_BYTES = 1 << 30


def tenant(name: str, **limits: object) -> Tenant:
    return Tenant(id=TenantId(name), salt=name, limits=TenantLimits(**limits))  # type: ignore[arg-type]


def threads_of(count: int, *, bound: int = 100) -> FairThreads:
    return FairThreads(count, memory=BodyMemory(MEMORY_BYTES, shed=print), bound=bound, ageing_s=1e6, clock=monotonic)


class Gate:
    """Work that ends when it may."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(LIMIT_S)


@contextmanager
def held(threads: FairThreads, *, size_bytes: int = 1) -> Iterator[list[Gate]]:
    """Let work of some tenant take all threads that it may, until the block ends."""
    gates: list[Gate] = []
    tasks: list[asyncio.Task[None]] = []

    def more() -> Gate:
        gates.append(Gate())
        tasks.append(asyncio.create_task(threads.run(gates[-1], tenant=tenant("first"), size_bytes=size_bytes)))
        return gates[-1]

    try:
        for _ in range(threads._count):
            more()
        yield gates
    finally:
        for gate in gates:
            gate.opened.set()


async def until(*tasks: "asyncio.Task[None]", waiting: int, threads: FairThreads) -> None:
    del tasks
    async with asyncio.timeout(LIMIT_S):
        while threads.waiting != waiting:
            await asyncio.sleep(0.001)


async def test_tenants_take_turns_by_what_they_have_got_whoever_came_first() -> None:
    done: list[str] = []
    with threads_of(1) as threads:
        with held(threads) as gates:
            await asyncio.to_thread(gates[0].begun.wait, LIMIT_S)
            asked = [("greedy", 300)] * 4 + [("modest", 100)] * 4
            tasks = [
                asyncio.create_task(
                    threads.run(lambda name=name: done.append(name), tenant=tenant(name), size_bytes=size)
                )
                for name, size in asked
            ]
            await until(*tasks, waiting=8, threads=threads)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    assert done == ["greedy", "modest", "modest", "modest", "greedy", "modest", "greedy", "greedy"]


async def test_weights_and_classes_hold_as_in_admission() -> None:
    done: list[str] = []
    with threads_of(1) as threads:
        with held(threads) as gates:
            await asyncio.to_thread(gates[0].begun.wait, LIMIT_S)
            asked = [
                tenant("low", priority=Priority.LOW),
                *[tenant("heavy", weight=2.0)] * 4,
                *[tenant("light")] * 2,
                tenant("high", priority=Priority.HIGH),
            ]
            tasks = [
                asyncio.create_task(threads.run(lambda name=each.id: done.append(name), tenant=each, size_bytes=100))
                for each in asked
            ]
            await until(*tasks, waiting=8, threads=threads)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    assert (done[0], done[-1]) == ("high", "low")
    assert done[1:-1] == ["heavy", "light", "heavy", "heavy", "light", "heavy"]


async def test_long_work_leaves_a_thread_to_short_work() -> None:
    with threads_of(3) as threads, held(threads, size_bytes=LONG_BYTES + 1) as gates:
        await until(waiting=1, threads=threads)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(20):
                assert await threads.run(lambda: 7, tenant=tenant("other"), size_bytes=LONG_BYTES) == 7
        assert [gate.begun.is_set() for gate in gates] == [True, True, False]


async def test_neither_kind_of_work_keeps_the_other_waiting_for_ever() -> None:
    done: list[int] = []
    with threads_of(1) as threads:
        with held(threads) as gates:
            await asyncio.to_thread(gates[0].begun.wait, LIMIT_S)
            tasks = [
                asyncio.create_task(
                    threads.run(lambda size=size: done.append(size), tenant=tenant("t"), size_bytes=size)
                )
                for size in [1] * 6 + [LONG_BYTES + 1] * 2
            ]
            await until(*tasks, waiting=8, threads=threads)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    assert sorted(done[:4]) == [1, 1, LONG_BYTES + 1, LONG_BYTES + 1]


async def test_too_much_that_waits_is_refused_and_the_tenant_with_most_pays() -> None:
    with threads_of(1, bound=2) as threads, held(threads) as gates:
        await asyncio.to_thread(gates[0].begun.wait, LIMIT_S)
        first, second = (
            asyncio.create_task(threads.run(lambda: None, tenant=tenant("many"), size_bytes=1)) for _ in range(2)
        )
        await until(first, second, waiting=2, threads=threads)
        with pytest.raises(RateLimitedError):
            await threads.run(lambda: None, tenant=tenant("many"), size_bytes=1)
        other = asyncio.create_task(threads.run(lambda: None, tenant=tenant("one"), size_bytes=1))
        with pytest.raises(RateLimitedError):
            await second
        gates[0].opened.set()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(first, other)


async def test_what_work_raises_comes_out_and_gives_the_thread_back() -> None:
    def fail() -> None:
        raise ValueError("no")

    with threads_of(1) as threads:
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await threads.run(fail, tenant=tenant("t"), size_bytes=1)


async def test_memory_counts_from_the_beginning_of_work_to_its_end_also_when_its_client_has_left() -> None:
    with threads_of(1) as threads:
        gate = Gate()
        running = asyncio.create_task(threads.run(gate, tenant=tenant("t"), size_bytes=1000, times=16))
        waiting = asyncio.create_task(threads.run(lambda: None, tenant=tenant("t"), size_bytes=10, times=16))
        await asyncio.to_thread(gate.begun.wait, LIMIT_S)
        assert threads.memory.held_bytes == 16_000
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert threads.memory.held_bytes == 16_000
        gate.opened.set()
        async with asyncio.timeout(LIMIT_S):
            while threads.memory.held_bytes:
                await asyncio.sleep(0.001)


async def test_a_tenants_bodies_are_refused_while_its_tokenizing_takes_its_memory_and_others_find_room() -> None:
    with threads_of(1) as threads:
        gate = Gate()
        running = asyncio.create_task(threads.run(gate, tenant=tenant("t"), size_bytes=MEMORY_BYTES, times=16))
        await asyncio.to_thread(gate.begun.wait, LIMIT_S)
        assert threads.memory.held_bytes == MEMORY_BYTES // 2
        other = threads.memory.reserve(TenantId("other"))
        other.take(MEMORY_BYTES // 8 // TIMES)
        other.give_back()
        body = threads.memory.reserve(TenantId("t"))
        with pytest.raises(RateLimitedError, match="saturated"):
            body.take(1)
        gate.opened.set()
        await running
        async with asyncio.timeout(LIMIT_S):
            while threads.memory.held_bytes:
                await asyncio.sleep(0.001)
        body.take(1)
        body.give_back()


async def test_threads_that_are_gone_say_so() -> None:
    with threads_of(1) as threads:
        pass
    with pytest.raises(RuntimeError, match="shutdown"):
        await threads.run(lambda: None, tenant=tenant("t"), size_bytes=1, times=16)
    assert threads.memory.held_bytes == 0


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_however_clients_leave(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    most = 0
    running = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(chance.random() / 500)
        with lock:
            running -= 1
        if chance.random() < 0.2:
            raise ValueError("no")

    with threads_of(3) as threads:
        tasks = []
        for _ in range(200):
            size = chance.choice([1, LONG_BYTES + 1])
            owner = tenant(f"t{chance.randrange(4)}")
            tasks.append(asyncio.create_task(threads.run(work, tenant=owner, size_bytes=size, times=16)))
            await asyncio.sleep(chance.random() / 1000)
            assert threads.memory.held_bytes <= 16 * (LONG_BYTES + 1) * 2 + 16
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
        async with asyncio.timeout(LIMIT_S):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            while threads._short.running or threads._long.running:
                await asyncio.sleep(0.001)
        assert all(each is None or isinstance(each, asyncio.CancelledError | ValueError) for each in ended)
        assert threads.memory.held_bytes == 0
        assert not threads.memory._held
        assert threads.waiting == 0
        assert not threads._short.waiters
        assert not threads._long.waiters
    assert most <= 3
