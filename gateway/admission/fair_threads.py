"""Threads for work that would hold up the event loop: tenants get fair shares of them, as they do of instances.

Who is next is decided by the queue of admission (``FairQueue``): classes, ageing, and between tenants the one that has
got least, counted in bytes. Long work is apart from short work and never has all threads: however many long prompts
wait, a short one finds a thread. The two take turns when a thread becomes free.

Work that has begun can't be stopped. When its client leaves, its thread stays taken until it ends, and so does the
memory that it counts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, TypeVar

from gateway.admission import FairQueue, Waiting
from gateway.errors import RateLimitedError
from gateway.http.body_memory import BodyMemory
from gateway.types import Tenant, TenantId

T = TypeVar("T")

LONG_BYTES: Final = 1 << 20
"""Work on more bytes is long: tokenizing so many takes up to a second."""
_RETRY_AFTER_S: Final = 2


@dataclass(slots=True)
class _Lane:
    """Work of one kind: at most ``most`` of it runs at once."""

    queue: FairQueue
    most: int
    running: int = 0
    waiters: dict[Waiting, "asyncio.Future[bool]"] = field(default_factory=dict)


class FairThreads:
    """``count`` threads, 2 at least where long work is to leave one free; ``bound`` is for what waits of each kind.

    A context manager: its end waits for work that runs. One event loop.
    """

    def __init__(
        self, count: int, *, memory: BodyMemory, bound: int, ageing_s: float, clock: Callable[[], float]
    ) -> None:
        self.memory = memory
        self._count = count
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=count, thread_name_prefix="work")
        self._short, self._long = (
            _Lane(FairQueue(bound=bound, ageing_s=ageing_s), most) for most in (count, max(1, count - 1))
        )
        self._last = self._long

    @property
    def waiting(self) -> int:
        """How much work waits for a thread."""
        return len(self._short.queue) + len(self._long.queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], T], *, tenant: Tenant, size_bytes: int, times: int = 0) -> T:
        """Return the result of ``work``, run in a thread in fair order of tenants; raises its errors.

        ``size_bytes`` is about how much it works on, ``times`` as often each of them counts in memory while it runs.
        Raises ``RateLimitedError`` when too much waits already.
        """
        lane = self._long if size_bytes > LONG_BYTES else self._short
        limits = tenant.limits
        waiting = Waiting(
            tenant=tenant.id,
            weight=limits.weight,
            priority=limits.priority,
            work=float(max(1, size_bytes)),
            arrived_s=self._clock(),
        )
        if not lane.queue and self._has_thread(lane):
            lane.queue.let_in(tenant.id, limits.weight, waiting.work)
            self._take(lane)
        else:
            await self._wait_for_thread(lane, waiting)
        return await asyncio.wrap_future(self._begun(lane, work, tenant.id, size_bytes * times))

    async def _wait_for_thread(self, lane: _Lane, waiting: Waiting) -> None:
        """Return when this work may begin; a thread is taken for it then."""
        loser = lane.queue.push(waiting)
        if loser is waiting:
            raise _saturated(len(lane.queue))
        if loser is not None:
            lane.waiters.pop(loser).set_result(False)
        waiter = lane.waiters[waiting] = asyncio.get_running_loop().create_future()
        try:
            if not await waiter:
                raise _saturated(len(lane.queue))
        except asyncio.CancelledError:
            if lane.waiters.pop(waiting, None) is not None:
                lane.queue.remove(waiting)
            elif waiting.granted:
                self._ended(lane)
            raise

    def _begun(self, lane: _Lane, work: Callable[[], T], tenant: TenantId, memory_bytes: int) -> "Future[T]":
        loop = asyncio.get_running_loop()
        try:
            job = self._executor.submit(work)
        except RuntimeError:  # the threads are gone, as the gateway ends
            self._ended(lane)
            raise
        counted = self.memory.charge(tenant, memory_bytes)

        def ended() -> None:
            self.memory.give_back(tenant, counted)
            self._ended(lane)

        job.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
        return job

    def _has_thread(self, lane: _Lane) -> bool:
        return lane.running < lane.most and self._short.running + self._long.running < self._count

    def _take(self, lane: _Lane) -> None:
        lane.running += 1
        self._last = lane

    def _ended(self, lane: _Lane) -> None:
        """Give the thread back, and begin work that waits as long as there are threads."""
        lane.running -= 1
        while any(self._give_thread(each) for each in self._lanes_in_order()):
            pass

    def _lanes_in_order(self) -> tuple[_Lane, _Lane]:
        """The kinds of work, the one first that did not begin last."""
        return (self._long, self._short) if self._last is self._short else (self._short, self._long)

    def _give_thread(self, lane: _Lane) -> bool:
        while lane.queue and self._has_thread(lane):
            waiting = lane.queue.pop(self._clock())
            if waiting is None:
                return False
            waiter = lane.waiters.pop(waiting)
            if waiter.done():  # its client has left in this very step
                lane.queue.correct(waiting.tenant, waiting.weight, -waiting.work)
                continue
            waiting.granted = True
            self._take(lane)
            waiter.set_result(True)
            return True
        return False


def _saturated(waiting: int) -> RateLimitedError:
    return RateLimitedError(
        f"the gateway is saturated: {waiting} long requests wait to be read",
        code="saturated",
        retry_after_s=_RETRY_AFTER_S,
    )
