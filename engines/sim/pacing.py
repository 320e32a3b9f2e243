"""Whether the next step of a simulated engine computes prompts or tokens: by LMDeploy's own rule, or by a pace of ours.

``at_once`` is the simplest: a prompt step as soon as a prompt waits, and a decode step between two of them. The others
are those of an LMDeploy instance, with the same code (``kvcontrol.scheduler_ir.pacing``): ``lmdeploy``, ``alternate``
and ``itl_target``. What an instance learns from its steps is known here from the first one on.

LMDeploy's rule begins a prompt when as many prompt tokens wait as a step computes, when fewer than half of the places
are taken, or after sixteen decode steps. After a chunk that is not the last, one decode step follows. Last chunks, and
prompts without chunks, follow each other without any.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engines.sim.sequence import SimSequence
from engines.sim.timing import TimeModel
from kvcontrol.kv_policy.spec import parse_spec
from kvcontrol.scheduler_ir.pacing import (
    MOST_OWED,
    ActiveChunk,
    ChunkBounds,
    Pace,
    Reason,
    StepCommand,
    StepCosts,
    StepView,
    decide,
    make_pace,
    owed,
)

AT_ONCE: Final = "at_once"


class KnownCosts(StepCosts):
    """What steps cost by a time model, as an instance knows it once it has measured enough of them."""

    def __init__(self, time: TimeModel, most_tokens: int) -> None:
        super().__init__()
        self._time = time
        self.longest_tokens = most_tokens

    def prefill_s(self, tokens: int, pairs: float, history_tokens: int) -> float:
        """See ``StepCosts``."""
        time = self._time
        return time.step_s + tokens * time.token_s + pairs * time.pair_s + history_tokens * time.context_s

    def fixed_s(self, history_tokens: int) -> float:
        """See ``StepCosts``."""
        return self._time.step_s + history_tokens * self._time.context_s

    def decode_s(self, sequences: int, history_tokens: int) -> float:
        """See ``StepCosts``."""
        return self._time.span_s(1, sequences, history_tokens)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts that have blocks, the long one of them that is under way, and those that have none."""

    placed: Iterable[SimSequence]
    active: SimSequence | None
    queue: Iterable[SimSequence]

    def waiting_tokens(self) -> int:
        """Return the tokens of all that wait, cached ones too. O(those that wait)."""
        placed = sum(each.target for each in self.placed if each is not self.active)
        return placed + sum(each.target for each in self.queue)


class SimPacer:
    """Follow a pace by ``name`` and parameters, as ``itl_target(overlapped_tokens=0)``; raises ``PolicyError``."""

    def __init__(self, name: str, time: TimeModel, *, block_tokens: int, most_tokens: int, max_batch: int) -> None:
        self.is_at_once = name == AT_ONCE
        self.pace: Pace | None = None if self.is_at_once else _pace(name)
        self._costs = KnownCosts(time, most_tokens)
        self._bounds = ChunkBounds(block_tokens=min(block_tokens, most_tokens), most_tokens=most_tokens)
        self._most_tokens = most_tokens
        self._max_batch = max_batch
        self._debt = 0
        self._decodes = 0
        """Decode steps since the last step of prompts."""
        self._was_chunk = False

    @property
    def overtaken_share(self) -> float:
        """Tokens of shorter prompts that may go before the rest of a long one, per token of its own."""
        return 0.0 if self.pace is None else self.pace.overtaken_share

    def choose(self, prompts: Prompts, *, answering: int, context_tokens: int) -> StepCommand:
        """Return the next step; a prompt waits, and no chunk overlaps with decode steps now."""
        if self.is_at_once:
            is_due = not answering or not self._debt
            return StepCommand(is_prefill=is_due, reason=Reason.PROMPT if is_due else Reason.OWED)
        is_due = self._is_due(prompts, answering)
        if self.pace is None:
            return self._lmdeploy_rule(prompts.active, answering, is_due=is_due)
        active = prompts.active
        chunk = None
        if active is not None:
            chunk = ActiveChunk(left_tokens=active.target - active.computed, history_tokens=active.computed)
        view = StepView(
            answering=answering,
            answering_history_tokens=context_tokens,
            is_prompt_due=is_due,
            chunk=chunk,
            usual_history_tokens=next((each.computed for each in prompts.placed), 0),
            debt=self._debt,
            can_overlap=self.pace.overlapped_tokens > 0,
        )
        return decide(view, self.pace, self._costs, self._bounds)

    def prefilled(self, seconds: float, *, is_chunk: bool, answering: int, context_tokens: int) -> None:
        """A step of prompts begins; ``is_chunk``: not its prompt's last one. Overlapping chunks don't count."""
        self._decodes, self._was_chunk = 0, is_chunk
        if self.is_at_once:
            self._debt = 1
        elif not answering:
            self._debt = 0
        elif self.pace is not None:
            decode_s = self._costs.decode_s(answering, context_tokens)
            self._debt = max(self._debt, owed(self.pace, seconds, decode_s))

    def decoded(self, steps: int) -> None:
        """Decode steps begin."""
        self._debt = max(0, self._debt - steps)
        self._decodes += steps
        self._was_chunk = False

    def _is_due(self, prompts: Prompts, answering: int) -> bool:
        if 2 * answering < self._max_batch or self._decodes >= MOST_OWED:
            return True
        return prompts.waiting_tokens() >= self._most_tokens

    def _lmdeploy_rule(self, active: SimSequence | None, answering: int, *, is_due: bool) -> StepCommand:
        if active is not None:
            is_last = active.target - active.computed <= self._most_tokens
            is_due = is_last or not self._was_chunk
        if not answering:
            return StepCommand(is_prefill=True, reason=Reason.NOBODY_ANSWERS)
        return StepCommand(is_prefill=is_due, reason=Reason.PROMPT if is_due else Reason.OWED)


def check_pace(name: str) -> None:
    """Raise ``PolicyError`` for a pace that there isn't."""
    if name != AT_ONCE:
        _pace(name)


def _pace(name: str) -> Pace | None:
    spec = parse_spec(name)
    return make_pace(spec.name, spec.parameters)
