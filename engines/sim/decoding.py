"""Spans of decode steps: as many steps as nothing interrupts, and the pauses between the tokens that they make."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engines.sim.batch import DecodeBatch
from engines.sim.counters import Counters
from engines.sim.gaps import GapHistogram
from engines.sim.sequence import Listener, SimSequence
from engines.sim.timing import TimeModel


@dataclass(slots=True)
class Span:
    """``steps`` steps from ``start_s`` on; ``pace`` is how much slower than the model they are."""

    end_s: float
    start_s: float
    steps: int
    sequences: int
    context: int
    pace: float


class Decoder:
    """Steps of the sequences in a batch. ``stream``: a span is one step, and the listener gets each token."""

    def __init__(self, batch: DecodeBatch, time: TimeModel, counters: Counters, *, stream: bool) -> None:
        self.gaps = GapHistogram()
        self._batch = batch
        self._time = time
        self._counters = counters
        self._stream = stream
        self._last_step_s = 0.0
        self._joined_s: dict[int, float] = {}
        """When the latest token came of each sequence that joined after the last decode step, by its number."""

    def join(self, sequence: SimSequence, now_s: float) -> None:
        """Have a sequence, of which the first token has come now, decode from the next step on."""
        self._joined_s[sequence.number] = now_s
        self._batch.join(sequence)

    def leave(self, sequence: SimSequence) -> None:
        """Have a sequence decode no more, and note when its latest token came."""
        self._batch.leave(sequence)
        sequence.last_token_s = self._joined_s.pop(sequence.number, self._last_step_s)

    def resumed(self, sequence: SimSequence, now_s: float) -> None:
        """Count the pause of a sequence that was preempted and has its next token now."""
        self.gaps.add(now_s - sequence.last_token_s, 1)

    def begin(self, now_s: float, *, pace: float, until_s: float, single: bool) -> Span:
        """Begin a span. It ends with the step that runs at ``until_s``; ``single``: with its first one."""
        sequences, context = len(self._batch), self._batch.context_tokens
        steps = self._batch.steps_undisturbed()
        if self._stream or single:
            steps = 1
        elif until_s < math.inf:
            steps = min(steps, 1 + self._time.steps_within((until_s - now_s) / pace, sequences, context))
        seconds = pace * self._time.span_s(steps, sequences, context)
        return Span(now_s + seconds, now_s, steps, sequences, context, pace)

    def cut(self, work: object, now_s: float) -> None:
        """Let a span end with the step that runs now; other work stays as it is."""
        if isinstance(work, Span) and work.steps > 1:
            done = self._time.steps_within((now_s - work.start_s) / work.pace, work.sequences, work.context)
            if done + 1 < work.steps:
                work.steps = done + 1
                work.end_s = work.start_s + work.pace * self._time.span_s(work.steps, work.sequences, work.context)

    def ended(self, work: Span, listener: Listener) -> Iterator[SimSequence]:
        """Count the steps of a span that is over, and return the sequences that end with it."""
        sequences, steps, end_s = work.sequences, work.steps, work.end_s
        counters = self._counters
        counters.busy_s += end_s - work.start_s
        counters.steps += steps
        counters.generated_tokens += steps * sequences
        each_s = (end_s - work.start_s) / steps
        first_s = work.start_s + each_s
        for joined_s in self._joined_s.values():
            self.gaps.add(first_s - joined_s, 1)
        self.gaps.add(first_s - self._last_step_s, sequences - len(self._joined_s))
        self.gaps.add(each_s, sequences * (steps - 1))
        self._last_step_s = end_s
        self._joined_s.clear()
        self._batch.step(steps)
        if self._stream:
            for sequence in self._batch.sequences:
                listener.produced(sequence, steps, end_s)
        return self._batch.ended()
