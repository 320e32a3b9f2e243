"""Which of an engine's waiting sequences LMDeploy tries next: a strategy's order instead of that of arrival.

LMDeploy looks at *all* waiting sequences several times in a step, and sorts them. With thousands that takes longer
than the step. So the strategy's queue is told of each sequence that begins or ceases to wait, and LMDeploy is shown a
window: the next ones in the strategy's order, and whatever came back and may still hold blocks (preempted, or loaded
from a tier), as only a sequence that is seen can be evicted. Nobody is forgotten: a sequence that isn't shown keeps its
place.

Within the window LMDeploy's lanes stay: sequences whose KV was loaded go first, and long prompts take turns with short
ones; in each lane the order is the strategy's. Nothing here raises into the engine's loop: after an error LMDeploy's
own order is in charge, which the report and the log say, until a strategy is chosen again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from math import inf
from typing import Any, Final

from engines.control.waits import WaitCounts
from engines.lmdeploy.schedule.uncached import look_up
from engines.lmdeploy.schedule.urgency import urgency_of_sequence
from engines.lmdeploy.schedule.waiting_request import waiting_id, waiting_request
from kvcontrol.core.policy_control import ScheduleReport
from kvcontrol.scheduler_ir.strategies import (
    EngineView,
    WaitingQueue,
    hand_over,
    make_strategy,
)

_QUEUE: Final = "kvgate_queue"
_LEAST_WINDOW: Final = 64
_PER_SLOT: Final = 2
_SAME_STEP_S: Final = 0.005
"""For so long the window stays as it is while nobody comes or goes: LMDeploy asks for it several times in a step."""
_LOOK_UPS: Final = 16
"""New sequences of which a step looks up what is cached."""
_log = logging.getLogger(__name__)


class EngineQueue:
    """The waiting sequences of one LMDeploy scheduler. The engine's thread; ``report`` on any."""

    def __init__(self, scheduler: Any, queue: WaitingQueue, clock: Callable[[], float] = time.perf_counter) -> None:
        from lmdeploy.pytorch.messages import MessageStatus

        self._waiting_status = MessageStatus.WAITING
        self._stopped_status = MessageStatus.STOPPED
        self._running_status = MessageStatus.RUNNING
        self._scheduler = scheduler
        self._manager = scheduler.seq_manager
        self._block_size = int(scheduler.cache_config.block_size)
        self._clock = clock  # the one of ``arrive_time``
        self._queue = queue
        self._returned: dict[int, Any] = {}
        self._shown: list[Any] = []
        self._shown_s = inf  # nothing that may be shown again
        self._alone: Any = None
        self._new: dict[int, Any] = {}  # of which nobody has looked up what is cached
        self._counts = WaitCounts()
        self._promotions = 0
        self._all_returned = 0
        self.window = max(_LEAST_WINDOW, _PER_SLOT * int(scheduler.scheduler_config.max_batches))
        self.errors = 0
        self.repairs = 0
        self.failed = False

    @property
    def strategy(self) -> str:
        """The one in charge; ``lmdeploy`` after an error."""
        return "lmdeploy" if self.failed else self._queue.name

    def __len__(self) -> int:
        return len(self._queue)

    def registered(self, seq: Any) -> None:
        """A new sequence is known to LMDeploy."""
        if seq.status is self._waiting_status:
            self._new[int(seq.seq_id)] = seq
            self._guarded(self._came, seq)

    def unregistered(self, seq: Any) -> None:
        """A sequence is about to be forgotten by LMDeploy."""
        if seq.status is self._waiting_status:
            self._guarded(self._gone, seq, None)

    def changed(self, seq: Any, before: Any, after: Any) -> None:
        """A sequence went from one status to another."""
        if before is self._waiting_status:
            self._guarded(self._gone, seq, after)
        elif after is self._waiting_status:
            self._returned[int(seq.seq_id)] = seq
            self._all_returned += 1
            self._guarded(self._came, seq)

    def front(self) -> list[Any] | None:
        """Return the window, in order; None where LMDeploy's own order is in charge."""
        if self._alone is not None:
            return [self._alone]
        return None if self.failed else self._guarded(self._front)

    @contextmanager
    def showing(self, seq: Any) -> Iterator[None]:
        """Let the window be one waiting sequence for the length of a block."""
        self._alone = seq
        try:
            yield
        finally:
            self._alone = None

    def arranged(self, reorderer: Any, waiting: list[Any], order_policy: Any) -> list[Any] | None:
        """Return the result of ``front``, lane by lane; None under LMDeploy's own order."""
        return None if self.failed else self._guarded(_in_lanes, reorderer, waiting, order_policy)

    def swap(self, queue: WaitingQueue) -> None:
        """Put another strategy's empty queue in charge, with all that wait. When it raises nothing has changed."""
        if self.failed:
            for seq in self._waiting().values():
                queue.add(waiting_request(seq, self._block_size, self._returned))
            self._count_anew()
            self.failed = False
        else:
            hand_over(self._queue, queue)
        self._promotions += self._queue.promotions
        self._queue = queue
        self._shown_s = inf

    def report(self, *, swaps: int, in_charge_s: float) -> ScheduleReport:
        """Return the statistics; numbers may be a moment apart."""
        queue = self._queue
        oldest_s = queue.oldest_s
        return ScheduleReport(
            waiting=len(queue),
            oldest_s=0.0 if oldest_s is None else round(max(0.0, self._clock() - oldest_s), 3),
            window=self.window,
            ageing_bound_s=queue.ageing_bound_s,
            promotions=self._promotions + queue.promotions,
            returned=self._all_returned,
            classes=self._counts.report(),
            swaps=swaps,
            in_charge_s=in_charge_s,
            state=queue.state,
            errors=self.errors,
            repairs=self.repairs,
        )

    def _came(self, seq: Any) -> None:
        self._shown_s = inf
        if not self.failed:
            self._queue.add(waiting_request(seq, self._block_size, self._returned))
        self._counts.came(urgency_of_sequence(seq).priority)

    def _gone(self, seq: Any, after: Any) -> None:
        self._shown_s = inf
        self._new.pop(int(seq.seq_id), None)
        priority = urgency_of_sequence(seq).priority
        self._counts.gone(priority)
        came_back = self._returned.pop(int(seq.seq_id), None) is not None
        started = after is not None and after is not self._stopped_status
        if not self.failed:
            name = waiting_id(seq)
            if started:
                self._queue.start(name, self._clock())
            else:
                self._queue.remove(name)
        if came_back:
            return
        if started:
            self._counts.started(priority, max(0.0, self._clock() - float(seq.arrive_time)))
        else:
            self._counts.left(priority)

    def _front(self) -> list[Any]:
        waiting, now_s = self._waiting(), self._clock()
        if len(waiting) != len(self._queue):
            self._repair(waiting)
        if self._new and len(waiting) > 1:  # the order of one doesn't matter
            self._look_up()
        if not self._shown_s <= now_s < self._shown_s + _SAME_STEP_S:
            self._shown = self._window_of(waiting, now_s)
            self._shown_s = now_s
        return list(self._shown)  # LMDeploy takes from it

    def _look_up(self) -> None:
        """Find out what is cached of some that are new, and give them the places that are theirs."""
        for number, seq in list(islice(self._new.items(), _LOOK_UPS)):
            del self._new[number]
            if look_up(self._scheduler, seq):
                self._queue.remove(waiting_id(seq))
                self._queue.add(waiting_request(seq, self._block_size, self._returned))
                self._shown_s = inf

    def _window_of(self, waiting: dict[int, Any], now_s: float) -> list[Any]:
        view = EngineView(running=self._manager.num_sequences(self._running_status))
        chosen = self._queue.peek(self.window, now_s, view)
        window = [waiting[int(request.request_id)] for request in chosen]
        if self._returned:
            seen = {int(request.request_id) for request in chosen}
            window += [seq for number, seq in self._returned.items() if number not in seen]
        return window

    def _repair(self, waiting: dict[int, Any]) -> None:
        self.repairs += 1
        _log.error("the waiting queue held %d sequences where LMDeploy has %d", len(self._queue), len(waiting))
        for request in list(self._queue):
            self._queue.remove(request.request_id)
        self._new = {number: seq for number, seq in self._new.items() if number in waiting}
        for seq in waiting.values():
            self._queue.add(waiting_request(seq, self._block_size, self._returned))
        self._count_anew()

    def _count_anew(self) -> None:
        self._counts.nobody_waits()
        for seq in self._waiting().values():
            self._counts.came(urgency_of_sequence(seq).priority)

    def _waiting(self) -> dict[int, Any]:
        waiting: dict[int, Any] = self._manager.get_sequences(self._waiting_status)
        return waiting

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception:  # noqa: BLE001  # the engine's loop would die of it
            self.errors += 1
            if not self.failed:
                _log.exception("the strategy %s failed: LMDeploy's own order is in charge", self._queue.name)
            self.failed = True
            return None


def queue_of(scheduler: Any) -> EngineQueue | None:
    """Return the queue of LMDeploy's scheduler, None where there is none."""
    queue: EngineQueue | None = getattr(scheduler.seq_manager, _QUEUE, None)
    return queue


def _in_lanes(reorderer: Any, waiting: list[Any], order_policy: Any) -> list[Any]:
    """Keep the order within each of LMDeploy's lanes; every sequence is in exactly one."""
    is_loaded = reorderer.prefill_scheduler.load_coordinator.is_remote_ready
    loaded = [seq for seq in waiting if is_loaded(seq)]
    others = [seq for seq in waiting if not is_loaded(seq)] if loaded else waiting
    if not order_policy.prefers_long_prefill and order_policy.allows_nonfinal_long_prefill:
        return loaded + others
    short, long = reorderer._split_by_prefill_kind(others)  # noqa: SLF001
    if order_policy.prefers_long_prefill and long:
        return [*loaded, long[0], *short, *long[1:]]
    return loaded + others if order_policy.allows_nonfinal_long_prefill else loaded + short + long


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def scheduler_init(original: Callable[..., None]) -> Callable[..., None]:
    """``Scheduler.__init__``: it gets its queue, FIFO like LMDeploy's until the settings' strategy is put in charge."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # called by this name
        original(self, *args, **kwargs)
        queue = EngineQueue(self, make_strategy("fifo"))
        setattr(self.seq_manager, _QUEUE, queue)
        setattr(self._prefill_scheduler, _QUEUE, queue)

    return __init__


def scheduler_waiting(original: property) -> property:
    """``Scheduler.waiting``: the window instead of all."""
    function = original.fget
    assert function is not None  # noqa: S101 - it is LMDeploy's

    def waiting(self: Any) -> Any:
        queue = queue_of(self)
        window = None if queue is None else queue.front()
        return function(self) if window is None else window

    return property(waiting)


def manager_register(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``SequenceManager.register_sequence``: one more may wait."""

    def register_sequence(self: Any, seq: Any) -> None:
        original(self, seq)
        queue = getattr(self, _QUEUE, None)
        if queue is not None:
            queue.registered(seq)

    return register_sequence


def manager_unregister(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``SequenceManager.unregister_sequence``: a sequence ends."""

    def unregister_sequence(self: Any, seq: Any) -> None:
        original(self, seq)
        queue = getattr(self, _QUEUE, None)
        if queue is not None:
            queue.unregistered(seq)

    return unregister_sequence


def manager_update(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``SequenceManager.update_sequence_status``: one begins or ceases to wait."""

    def update_sequence_status(self: Any, seq: Any, new_status: Any) -> None:
        before = seq.status
        known = seq.seq_id in self.get_sequences(before)
        original(self, seq, new_status)
        queue = getattr(self, _QUEUE, None)
        if queue is not None and known and before is not new_status:
            queue.changed(seq, before, new_status)

    return update_sequence_status


def reorder(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """``_PrefillReorderer.reorder``: the strategy's order within LMDeploy's lanes."""

    def reorder(self: Any, waiting: Any, turn_policy: Any) -> Any:
        queue = getattr(self.prefill_scheduler, _QUEUE, None)
        arranged = None if queue is None else queue.arranged(self, waiting, turn_policy)
        return original(self, waiting, turn_policy) if arranged is None else arranged

    return reorder
