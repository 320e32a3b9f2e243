"""How long an engine's steps take, for the choice between loading a prompt's blocks and computing them."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from engines.control.guard import Guard


class StepTimes:
    """Steps with orders of the connector, in their order; the engine's thread."""

    def __init__(self, guard: Guard, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque()
        self._ended_s = -math.inf

    def ordered(self, running: Sequence[Any], token_lens: Sequence[int]) -> None:
        """A step with orders begins, in which so many prompt tokens are computed (``token_lens`` empty: none)."""
        ends = zip(running, token_lens, strict=False)
        tokens = self._guard(
            "count prompt tokens", 0, lambda: sum(int(end) - int(seq.num_history_ids) for seq, end in ends)
        )
        self._steps.append((tokens, self._clock()))

    def leave_out(self) -> None:
        """The step that was ordered last says nothing of its prompt tokens: it is over before they are computed."""
        if self._steps:
            self._steps.append((0, self._steps.pop()[1]))

    def ended(self) -> tuple[int, float] | None:
        """Return the prompt tokens of the oldest step, which has ended, and the seconds that it took; None for none.

        The next step may have been ordered, but not begun, before that.
        """
        if not self._steps:
            return None
        tokens, ordered_s = self._steps.popleft()
        began_s, self._ended_s = max(ordered_s, self._ended_s), self._clock()
        return tokens, self._ended_s - began_s

    def forget(self) -> None:
        """Nobody reports the ends of the steps that were ordered."""
        self._steps.clear()
