"""Who waits in a simulated engine, and in which order they go: that of arrival, or a strategy's.

First come, first served is a deque, with which an engine begins: fleets in virtual time have nothing else, since they
serve millions of requests, and a queue costs more than all else of a step.
Any other strategy is the queue that LMDeploy instances have (``kvcontrol.scheduler_ir.strategies``). A sequence that
was preempted goes before all others, whatever the strategy: what it has computed may still be in the cache.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final

from engines.control.waits import WaitCounts
from engines.sim.sequence import SimSequence
from kvcontrol.core.integrity import must
from kvcontrol.core.policy_control import ScheduleReport
from kvcontrol.scheduler_ir.strategies import (
    DEFAULT_AGEING_BOUND_S,
    EngineView,
    WaitingId,
    WaitingQueue,
    WaitingRequest,
)

FIFO: Final = "fifo"
_WINDOW: Final = 1
"""The engine looks at the next one, as long as that fits."""


class SimWaiting:
    """One engine's. ``now_s`` is the engine's clock, never less than at the call before."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._line: deque[SimSequence] = deque()
        """Those that came back, the next one first; behind them, where there is no queue, all others."""
        self._queue: WaitingQueue | None = None
        """All others, where they don't go by arrival."""
        self._queued: dict[WaitingId, SimSequence] = {}
        self._ageing_bound_s = DEFAULT_AGEING_BOUND_S
        self._counts = WaitCounts()
        self._promotions = 0
        self._returned = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._queued)

    def __iter__(self) -> Iterator[SimSequence]:
        """Give all that wait, in any order."""
        return chain(self._line, self._queued.values())

    @property
    def strategy(self) -> str:
        """The one in charge."""
        return FIFO if self._queue is None else self._queue.name

    def came(self, sequence: SimSequence) -> None:
        """A new one waits."""
        if self._queue is None:
            self._line.append(sequence)
        else:
            self._queue.add(self._waiting_request(sequence))
            self._queued[_name(sequence)] = sequence
        self._counts.came(sequence.request.urgency.priority)

    def came_back(self, sequence: SimSequence) -> None:
        """One was preempted: it is the next."""
        self._line.appendleft(sequence)
        self._returned += 1
        self._counts.came(sequence.request.urgency.priority)

    def first(self, now_s: float, running: int) -> SimSequence:
        """Return the next one, which stays; somebody must wait."""
        if self._line:
            return self._line[0]
        assert self._queue is not None  # noqa: S101 - somebody waits
        (chosen,) = self._queue.peek(1, now_s, EngineView(running=running))
        return self._queued[chosen.request_id]

    def started(self, sequence: SimSequence, now_s: float) -> None:
        """One goes on now."""
        queue = self._taken(sequence)
        if queue is not None:
            queue.start(_name(sequence), now_s)
        if sequence.preempted:
            return
        if queue is None:
            self._promotions += sequence.arrived_s <= now_s - self._ageing_bound_s
        self._counts.started(sequence.request.urgency.priority, now_s - sequence.arrived_s)

    def left(self, sequence: SimSequence) -> None:
        """Nobody wants this one any more."""
        queue = self._taken(sequence)
        if queue is not None:
            queue.remove(_name(sequence))
        if not sequence.preempted:
            self._counts.left(sequence.request.urgency.priority)

    def swap(self, queue: WaitingQueue) -> None:
        """Let another strategy's empty queue have all that wait. When it raises nothing has changed."""
        by_arrival = sorted((each for each in self if not each.preempted), key=lambda each: each.number)
        is_fifo = queue.name == FIFO
        if not is_fifo:
            for each in by_arrival:
                queue.add(self._waiting_request(each))
        if self._queue is not None:
            self._promotions += self._queue.promotions
        self._ageing_bound_s = queue.ageing_bound_s
        self._line = deque(each for each in self._line if each.preempted)
        if is_fifo:
            self._line.extend(by_arrival)
        self._queue = None if is_fifo else queue
        self._queued = {} if is_fifo else {_name(each): each for each in by_arrival}

    def report(self, now_s: float, *, swaps: int, in_charge_s: float) -> ScheduleReport:
        """Return the statistics. O(those that wait)."""
        queue = self._queue
        return ScheduleReport(
            waiting=len(self),
            oldest_s=round(max((now_s - each.arrived_s for each in self), default=0.0), 3),
            window=_WINDOW,
            ageing_bound_s=self._ageing_bound_s,
            promotions=self._promotions + (0 if queue is None else queue.promotions),
            returned=self._returned,
            classes=self._counts.report(),
            swaps=swaps,
            in_charge_s=in_charge_s,
            state="" if queue is None else queue.state,
            errors=0,
            repairs=0,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        back = [bool(each.preempted) for each in self._line]
        must(back == sorted(back, reverse=True), "one that came back waits behind another")
        if self._queue is None:
            must(not self._queued, "some wait for a queue that isn't there")
        else:
            self._queue.check_integrity()
            must(all(back), "one stands in line that belongs into the queue")
            must({each.request_id for each in self._queue} == self._queued.keys(), "the queue holds others")
        must(len({each.number for each in self}) == len(self), "one waits twice")
        must(all(not each.own and not each.attached for each in self), "one that waits has blocks")
        waiting = sum(each.waiting for each in self._counts.report().values())
        must(waiting == len(self), f"{len(self)} wait, {waiting} are counted")

    def _taken(self, sequence: SimSequence) -> WaitingQueue | None:
        """Take a sequence out; the queue that is returned is yet to be told why."""
        self._counts.gone(sequence.request.urgency.priority)
        if self._queue is None or sequence.preempted:
            self._line.remove(sequence)
            return None
        del self._queued[_name(sequence)]
        return self._queue

    def _waiting_request(self, sequence: SimSequence) -> WaitingRequest:
        request = sequence.request
        due_s = request.urgency.first_token_s
        is_whole = request.prompt_tokens > self._block_tokens
        return WaitingRequest(
            request_id=_name(sequence),
            arrived_s=sequence.arrived_s,
            prefill_tokens=request.prompt_tokens,
            priority=request.urgency.priority.level,
            deadline_s=None if due_s is None else sequence.arrived_s + due_s,
            prefix=int.from_bytes(request.chain.keys[0]) if is_whole else 0,
        )


def _name(sequence: SimSequence) -> WaitingId:
    return WaitingId(str(sequence.number))
