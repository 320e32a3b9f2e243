"""The steps of one engine: their content, their begin and end on the device, and the cause of idle time before.

A step goes through three places. The scheduler's side notes what it *sent* (``SentStep``). The model's side *opens* a
step when it takes that from its queue, and takes two moments around its work. When the device has passed the second
one, the step is *settled*: it becomes a ``Step`` of the report. Nothing waits for the device; what isn't past yet is
looked at again at the next step, and a moment after the engine has run out of work.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from engines.lmdeploy.schedule.step_clock import Moments
from engines.lmdeploy.schedule.step_metrics import StepCounts
from kvcontrol.core.steps import (
    IDLE_REASONS,
    KEPT_STEPS,
    IdleReason,
    Step,
    StepHistograms,
    StepKind,
    StepsQuery,
    StepsReport,
    StepTotals,
    summarize,
)

_MOST_SENT: Final = 64
"""Two are on their way in a working engine; more are an engine that doesn't take them."""
_SOON_S: Final = 0.02
_NEVER_IDLE: Final[Mapping[IdleReason, float]] = MappingProxyType(dict.fromkeys(IDLE_REASONS, 0.0))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentStep:
    """What the scheduler's side knows of a step. ``pairs`` is the number of (token, earlier token) pairs of its
    attention, ``answering`` how many answers were running when it was chosen, ``owed`` the decode steps that a pace
    expects it to owe them, ``sent_s`` is ``time.perf_counter``'s.
    """

    kind: StepKind
    reason: str
    sequences: int
    tokens: int
    history_tokens: int
    pairs: float
    answering: int
    waiting: int
    sent_s: float
    owed: int = 0

    @property
    def stalled(self) -> int:
        """Running answers that get no token from it."""
        if self.kind == "overlapped":
            return 0
        return max(0, self.answering - self.sequences) if self.kind == "decode" else self.answering


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A step between its two moments, or behind them and not past yet."""

    sent: SentStep
    began_s: float
    launched_s: float
    no_work_s: float
    kv_s: float
    is_kv_gap: bool
    is_no_work_gap: bool
    is_after_loss: bool
    begin: Any = None
    end: Any = None
    launch_s: float = 0.0


Measured = Callable[[SentStep, Step], None]
"""Gets each step that was measured, on the engine's thread."""


class StepTimeline:
    """One engine's. All on the engine's thread, but ``report`` and ``counts``, which are for any."""

    def __init__(self, moments: Moments, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._moments = moments
        self._clock = clock
        self._sent: deque[SentStep] = deque()
        self._open: OpenStep | None = None
        self._unsettled: deque[OpenStep] = deque()
        self._overlapped: deque[OpenStep] = deque()
        self._over: deque[OpenStep] = deque()
        self._last_end: Any = None
        self._waited_s: dict[IdleReason, float] = {"no_work": 0.0, "kv": 0.0, "host": 0.0}
        self._is_kv_gap = self._is_no_work_gap = self._is_after_loss = False
        self._lock = threading.Lock()
        self._kept: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._number = 0
        self._totals = StepTotals()
        self._histograms = StepHistograms()
        self._lost = 0
        self.measured: Measured | None = None

    @property
    def is_round_trip(self) -> bool:
        """Whether the model runs in other processes; then ``arrived`` replaces ``take`` to ``end``."""
        return self._moments.kind == "round_trip"

    # The scheduler's side.

    def sent(self, step: SentStep) -> None:
        """A step was handed to the model's side."""
        if len(self._sent) >= _MOST_SENT:
            self._lose(len(self._sent))
            self._sent.clear()
        self._sent.append(step)

    def forget(self) -> None:
        """Drop the steps that were sent and have not begun."""
        self._lose(len(self._sent))
        self._sent.clear()

    @contextmanager
    def waiting(self, reason: IdleReason) -> Iterator[None]:
        """Nothing is being computed inside, for this reason."""
        self.settle()
        since_s = self._clock()
        try:
            yield
        finally:
            self._waited_s[reason] += max(0.0, self._clock() - since_s)

    def idle_for(self, reason: IdleReason) -> None:
        """The idle time before the next step is all for this reason: it slept (no work), or polled for loads (KV)."""
        self._is_no_work_gap |= reason == "no_work"
        self._is_kv_gap |= reason == "kv"

    # The model's side.

    def take(self, *, is_decode: bool) -> None:
        """The next step that was sent is being begun."""
        self.settle()
        sent = self._sent.popleft() if self._sent else None
        if sent is None or (sent.kind == "decode") is not is_decode:
            self._lose(1)
            self._open = None
            return
        self._open = OpenStep(
            sent=sent,
            began_s=time.time(),
            launched_s=self._clock(),
            no_work_s=self._waited_s["no_work"],
            kv_s=self._waited_s["kv"],
            is_kv_gap=self._is_kv_gap,
            is_no_work_gap=self._is_no_work_gap,
            is_after_loss=self._is_after_loss,
        )
        self._waited_s["no_work"] = self._waited_s["kv"] = 0.0
        self._is_kv_gap = self._is_no_work_gap = self._is_after_loss = False

    def begin(self) -> None:
        """Record the begin of a step's forward; the time before it belongs to the host."""
        step = self._open
        if step is not None and step.begin is None:
            step.launched_s = self._clock()
            step.begin = self._moments.now()

    def begin_overlapped(self, stream: Any) -> OpenStep | None:
        """Begin the step that was taken on a ``stream`` of its own; ``end_overlapped`` takes what this returns."""
        step, self._open = self._open, None
        if step is not None:
            step.begin = self._moments.now(stream)
            self._overlapped.append(step)
        return step

    def end_overlapped(self, step: OpenStep | None, stream: Any) -> None:
        """All of an overlapping step has been launched."""
        if step is not None:
            step.launch_s = max(0.0, self._clock() - step.launched_s)
            step.end = self._moments.now(stream)
            self.settle()

    def end(self) -> None:
        """All of the step has been launched."""
        step, self._open = self._open, None
        if step is None:
            return
        if step.begin is None:
            self._lose(1)
            return
        step.launch_s = max(0.0, self._clock() - step.launched_s)
        step.end = self._moments.now()
        self._unsettled.append(step)
        self.settle()

    def arrived(self, *, is_decode: bool) -> None:
        """The tokens of the next step that was sent are back, from a model in other processes."""
        self.take(is_decode=is_decode)
        step, self._open = self._open, None
        if step is not None:
            step.begin = step.sent.sent_s if self._last_end is None else max(step.sent.sent_s, self._last_end)
            step.end = self._clock()
            step.launch_s = step.end - step.begin
            self._unsettled.append(step)
            self.settle()

    def fail(self) -> None:
        """The step that was begun has raised."""
        if self._open is not None:
            self._open = None
            self._lose(1)

    def settle(self) -> None:
        """Take in the steps that the device has ended."""
        while self._overlapped and _is_over(self._moments, self._overlapped[0]):
            chunk = self._overlapped.popleft()
            self._over.append(chunk)
            device_s = self._moments.between_s(chunk.begin, chunk.end)
            self._note(chunk, device_s=device_s, idle_s=_NEVER_IDLE, overlapped_s=0.0)
        while self._unsettled and self._moments.is_past(self._unsettled[0].end):
            self._settle(self._unsettled.popleft())

    def settle_soon(self) -> None:
        """Take in the last steps in a moment, though no other follows; on an event loop."""
        self.settle()
        if self._unsettled or any(chunk.end is not None for chunk in self._overlapped):
            asyncio.get_running_loop().call_later(_SOON_S, self.settle_soon)

    # Any thread.

    def report(self, query: StepsQuery) -> StepsReport:
        """Return the last steps with their summary, and the totals; O(kept steps)."""
        with self._lock:
            steps = list(self._kept)
            totals, lost = self._totals.minus(StepTotals()), self._lost
        chosen = [step for step in steps if step.number > query.after]
        chosen = chosen[max(0, len(chosen) - query.last) :] if query.last else []
        return StepsReport(clock=self._moments.kind, totals=totals, lost=lost, summary=summarize(chosen), steps=chosen)

    def counts(self) -> StepCounts:
        """Return copies of the values behind the metrics on ``/metrics``."""
        with self._lock:
            body = msgspec.msgpack.encode((self._totals, self._histograms))
            lost = self._lost
        totals, histograms = msgspec.msgpack.decode(body, type=tuple[StepTotals, StepHistograms])
        return StepCounts(totals=totals, histograms=histograms, lost=lost)

    def _settle(self, step: OpenStep) -> None:
        moments = self._moments
        is_first = self._last_end is None or step.is_after_loss
        gap_s = 0.0 if is_first else moments.between_s(self._last_end, step.begin)
        overlapped_s = min(
            gap_s,
            sum(_covered_s(moments, chunk, self._last_end, step.begin) for chunk in (*self._over, *self._overlapped)),
        )
        while self._over and moments.between_s(self._over[0].end, step.end) > 0:
            chunk = self._over.popleft()
            moments.free(chunk.begin)
            moments.free(chunk.end)
        idle_s = gap_s - overlapped_s
        no_work_s = idle_s if step.is_no_work_gap else min(idle_s, step.no_work_s)
        left_s = idle_s - no_work_s
        kv_s = left_s if step.is_kv_gap else min(left_s, step.kv_s)
        self._note(
            step,
            device_s=moments.between_s(step.begin, step.end),
            idle_s={"no_work": no_work_s, "kv": kv_s, "host": left_s - kv_s},
            overlapped_s=overlapped_s,
        )
        if self._last_end is not None:
            moments.free(self._last_end)
        moments.free(step.begin)
        self._last_end = step.end

    def _note(
        self, step: OpenStep, *, device_s: float, idle_s: Mapping[IdleReason, float], overlapped_s: float
    ) -> None:
        sent = step.sent
        self._number += 1
        done = Step(
            number=self._number,
            began_s=step.began_s,
            kind=sent.kind,
            reason=sent.reason,
            sequences=sent.sequences,
            tokens=sent.tokens,
            history_tokens=sent.history_tokens,
            device_s=device_s,
            launch_s=step.launch_s,
            no_work_s=idle_s["no_work"],
            kv_s=idle_s["kv"],
            host_s=idle_s["host"],
            stalled=sent.stalled,
            waiting=sent.waiting,
            overlapped_s=overlapped_s,
        )
        with self._lock:
            self._kept.append(done)
            self._totals.add(done)
            self._histograms.add(done)
        if self.measured is not None:
            self.measured(sent, done)

    def _lose(self, count: int) -> None:
        if count:
            self._is_after_loss = True
            with self._lock:
                self._lost += count
            _log.debug("%d steps of the engine were not measured", count)


def _covered_s(moments: Moments, chunk: OpenStep, since: Any, until: Any) -> float:
    """Return the seconds of an overlapping chunk between two moments."""
    if since is None or not moments.is_past(chunk.begin):
        return 0.0
    begin = chunk.begin if moments.between_s(since, chunk.begin) > 0 else since
    ended_before = _is_over(moments, chunk) and moments.between_s(chunk.end, until) > 0
    return moments.between_s(begin, chunk.end if ended_before else until)


def _is_over(moments: Moments, step: OpenStep) -> bool:
    return step.end is not None and moments.is_past(step.end)
