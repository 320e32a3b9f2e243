"""The active pace of an LMDeploy engine: alternates prompts and tokens, and sizes prompt chunks beside answers.

LMDeploy asks before each step whether prompts are next, and makes its inputs then. The pacer answers from a snapshot
(``kvcontrol.scheduler_ir.pacing``), sets the sizes that LMDeploy's scheduler and its chunker go by, both together, and
keeps the debt of decode steps. What steps cost it learns from the timeline. Beside these answers and sizes everything
is LMDeploy's: its lanes, its reservations, its order.

Nothing here raises into the engine's loop: after an error LMDeploy's own rule is in charge, which the report and the
log say, until a pace is chosen again.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from engines.lmdeploy.offload.setup import tiers_of
from engines.lmdeploy.schedule.overlap import Overlap, can_overlap, provide
from engines.lmdeploy.schedule.overtaking import Overtaking, can_overtake
from engines.lmdeploy.schedule.step_timeline import SentStep
from engines.lmdeploy.schedule.step_watch import answering, timeline_of
from kvcontrol.core.policy_control import PaceReport
from kvcontrol.core.steps import Step
from kvcontrol.scheduler_ir.pacing import (
    ActiveChunk,
    ChunkBounds,
    Pace,
    StepCommand,
    StepCosts,
    StepView,
    decide,
    limits,
    owed,
)

_PACER: Final = "kvgate_pacer"
NO_SPACE: Final = "no_room"
"""A step that was to compute prompts, for which there was no room."""
_FADING: Final = 1 / 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """The reported state of a pace, as of the last computed prompt."""

    decode_s: float | None = None
    chunk_tokens: int = 0
    chunk_s: float | None = None
    unmet: str = ""


class Pacer:
    """The pace of one LMDeploy scheduler. The engine's thread; ``report`` on any."""

    def __init__(self) -> None:
        self._pace: Pace | None = None
        self._maker: Any = None
        self._bounds = ChunkBounds(block_tokens=1, most_tokens=1)
        self._resizes = self._is_resized = self._can_overtake = False
        self.overtaking = Overtaking()
        self.overlap: Overlap | None = None
        self._costs = StepCosts()
        self._command: StepCommand | None = None
        self._debt = 0
        self._decode = (0, 0)
        self._decode_s: float | None = None
        self._usual_history = 0.0
        self._reasons: Counter[str] = Counter()
        self._last_unmet = ""
        self._shown = _Shown()
        self.errors = 0
        self.failed = False

    @property
    def is_possible(self) -> bool:
        """Whether the engine computes prompts and answers, one device's worth of it at a time."""
        return self._maker is not None

    @property
    def in_charge(self) -> bool:
        return self._pace is not None and self._maker is not None and not self.failed

    def bind(self, maker: Any) -> None:
        """Attach to LMDeploy's ``InputsMakerAsync``, whose loop begins."""
        prefill, config = maker.scheduler._prefill_scheduler, maker.config  # noqa: SLF001
        if self._maker is None:
            prefill.cache_config = copy.copy(prefill.cache_config)  # others read the engine's own
        most_tokens, block_tokens = int(config.max_prefill_token_num), int(config.block_size)
        self._bounds = ChunkBounds(block_tokens=min(block_tokens, most_tokens), most_tokens=most_tokens)
        # A recurrent state is saved at the ends of chunks, a draft model counts its rows by them.
        self._shown = _Shown(chunk_tokens=most_tokens)
        self._resizes = not (config.is_ssm or config.spec_decoding)
        prefill.cache_config.max_prefill_token_num = most_tokens
        self._is_resized = False
        self._can_overtake = can_overtake(maker)
        self.overlap = provide(maker) if can_overlap(maker) else None
        self._maker = maker
        self.overtaking.forget()
        self.forget()
        if (timeline := timeline_of(maker.scheduler)) is not None:
            timeline.measured = partial(self._guarded, self._learn)

    def swap(self, pace: Pace | None) -> None:
        """Set the pace, None for LMDeploy's own rule. Measurements stay."""
        self._pace, self.failed = pace, False
        self._last_unmet, self._shown = "", _Shown(chunk_tokens=self._bounds.most_tokens)
        self._costs.forget_pauses()
        self.forget()

    def forget(self) -> None:
        """Nothing is owed any more."""
        self._debt, self._command = 0, None

    def choose(self, rule: Callable[[], bool]) -> bool:
        """Return whether the next step computes prompts; ``rule`` is LMDeploy's."""
        self._command = None
        self._guarded(self.overtaking.resume, self._maker.long_context_chunker)
        if self._is_resized and not self.in_charge:  # here alone: between a chunk and the note of it sizes must stay
            self._resize(self._bounds.most_tokens, self._bounds.most_tokens)
            self._is_resized = False
        is_due = rule()
        if self.in_charge:
            self._guarded(self._choose, is_due)
        return is_due if self._command is None else self._command.is_prefill

    def defers_chunk(self) -> bool | None:
        """Return whether the active chunk lets a decode step pass; None where LMDeploy decides."""
        return None if self._command is None else not self._command.is_prefill

    def overtakes(self, task: Any) -> bool:
        """Schedule a shorter prompt before the active chunk, if one may overtake; return whether it is computed now."""
        pace, command = self._pace, self._command
        if not self._can_overtake or pace is None or not pace.overtaken_share or command is None:
            return False
        seq = self._guarded(self.overtaking.chosen, self._maker, pace.overtaken_share) if command.is_prefill else None
        return seq is not None and self.overtaking.overtake(task, seq, pace.overtaken_share)

    def overlaps(self, payload: dict[str, Any]) -> bool:
        """Let a chunk that was made overlap with the decode steps that follow, if it can; return whether it does."""
        pace, command, overlap = self._pace, self._command, self.overlap
        if overlap is None:
            return False
        is_prompt = payload["inputs"] is not None
        was_busy = is_prompt and overlap.is_busy
        does = pace is not None and command is not None and command.overlaps and overlap.admits(payload)
        if pace is not None and does:
            overlap.send(payload, pace.reserved_share)
        tiers = tiers_of(self._maker.scheduler.cache_config) if does or was_busy else None
        if tiers is not None:
            tiers.steps.leave_out()
        return does

    def sent(self, step: SentStep, *, is_continued: bool) -> SentStep:
        """Return a step with its reason and the decode steps that it owes; ``is_continued``: not the first chunk."""
        command = self._command
        if command is None:
            return step
        noted = self._guarded(self._sent, step, command, is_continued)
        return step if noted is None else noted

    def made_nothing(self) -> None:
        """The chosen step found no free block: no decode step is owed, or prompts would wait for ever; and none is
        there between which an overlapping chunk is launched.
        """
        self._debt = 0
        if self.overlap is not None:
            self.overlap.launch_rest()

    def report(self, *, swaps: int, in_charge_s: float) -> PaceReport:
        """Return the statistics; numbers may be a moment apart."""
        pace, shown = self._pace, self._shown
        return PaceReport(
            target_s=0.0 if pace is None else pace.target_s,
            decode_s=shown.decode_s,
            chunk_tokens=self._bounds.most_tokens if pace is None else shown.chunk_tokens,
            chunk_s=shown.chunk_s,
            debt=self._debt,
            decisions=dict(self._reasons),
            unmet="" if pace is None else shown.unmet,
            overtook=self.overtaking.count,
            gave_way=self.overtaking.gave_way,
            swaps=swaps,
            in_charge_s=in_charge_s,
            errors=self.errors,
        )

    def _choose(self, is_due: bool) -> None:  # noqa: FBT001 - LMDeploy's answer
        assert self._pace is not None  # noqa: S101 - it is in charge
        maker = self._maker
        chunker = maker.long_context_chunker
        chunker.check_enable()
        running = answering(maker)
        if not running:
            self._debt = 0
        chunk = None
        if chunker.enabled():
            seq = chunker.seq
            chunk = ActiveChunk(left_tokens=int(seq.num_token_ids), history_tokens=int(seq.num_history_ids))
        view = StepView(
            answering=running,
            answering_history_tokens=self._decode[1],
            is_prompt_due=is_due,
            chunk=chunk,
            usual_history_tokens=round(self._usual_history),
            debt=self._debt,
            can_overlap=self.overlap is not None,
            is_overlapping=self.overlap is not None and self.overlap.is_busy,
        )
        command = decide(view, self._pace, self._costs, self._bounds)
        if command.prompt_tokens is not None:
            self._resize(command.prompt_tokens, command.chunk_tokens)
        self._command = command

    def _resize(self, prompt_tokens: int, chunk_tokens: int | None) -> None:
        """Let LMDeploy's scheduler and chunker go by these sizes: both, or a chunk would be given up for another."""
        if not self._resizes:
            return
        self._is_resized = True
        maker = self._maker
        chunker = maker.long_context_chunker
        maker.scheduler._prefill_scheduler.cache_config.max_prefill_token_num = prompt_tokens  # noqa: SLF001
        chunker.max_prefill_token_num = prompt_tokens
        if not chunker.enabled():
            chunker.max_prefill_num = prompt_tokens
        elif chunk_tokens is not None and not chunker.has_multimodal:  # an image isn't cut
            chunker.max_prefill_num = chunk_tokens

    def _sent(self, step: SentStep, command: StepCommand, is_continued: bool) -> SentStep:  # noqa: FBT001
        is_decode = step.kind == "decode"
        reason = str(command.reason) if command.is_prefill is not is_decode else NO_SPACE
        self._reasons[reason] += 1
        if is_decode:
            self._debt = max(0, self._debt - 1)
            self._decode = (step.sequences, step.history_tokens)
            return replace(step, reason=reason)
        if not is_continued:
            self._usual_history += _FADING * (step.history_tokens / step.sequences - self._usual_history)
        debt = 0
        if step.answering and step.kind != "overlapped":
            expected_s = self._costs.prefill_s(step.tokens, step.pairs, step.history_tokens)
            debt = self._owed(expected_s, step.answering)
            self._debt = max(self._debt, debt)
        return replace(step, reason=reason, owed=debt)

    def _owed(self, prefill_s: float | None, answers: int) -> int:
        assert self._pace is not None  # noqa: S101 - it is in charge
        return owed(self._pace, prefill_s, self._costs.decode_s(answers, self._decode[1]))

    def _learn(self, sent: SentStep, step: Step) -> None:
        if sent.kind == "decode":
            self._costs.saw_decode(sent.sequences, sent.history_tokens, step.device_s)
            self._decode_s = step.device_s
        elif sent.kind in {"prefill", "chunk"}:
            self._costs.saw_prefill(sent.tokens, sent.pairs, sent.history_tokens, step.device_s)
            if self._pace is not None and self.in_charge:
                if sent.owed:  # it took longer than was expected: it owes more
                    self._debt += max(0, self._owed(step.device_s, sent.answering) - sent.owed)
                    self._costs.saw_pause(step.device_s + (self._decode_s or 0.0), self._pace.target_s)
                self._look(self._pace)

    def _look(self, pace: Pace) -> None:
        """Compute the reported state of the pace, and log once why the target is missed."""
        costs, history = self._costs, round(self._usual_history)
        decode_s = costs.decode_s(*self._decode)
        found = limits(pace, costs, self._bounds, decode_s, history)
        tokens = found.tokens if self._resizes else self._bounds.most_tokens
        self._shown = _Shown(
            decode_s=decode_s,
            chunk_tokens=tokens,
            chunk_s=costs.chunk_s(tokens, history),
            unmet=found.unmet if costs.is_late else "",
        )
        if self._shown.unmet and not self._last_unmet:
            self._last_unmet = found.unmet
            _log.warning("the ITL target of %g ms can't be kept: %s", pace.target_s * 1e3, found.unmet)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception:  # noqa: BLE001  # the engine's loop would die of it
            self.errors += 1
            if not self.failed:
                _log.exception("the pace failed: LMDeploy's own rule is in charge of the engine's steps")
            self.failed, self._command = True, None
            return None


def give_pacer(scheduler: Any) -> None:
    """Give LMDeploy's scheduler its pacer, LMDeploy's rule until the settings' pace is put in charge."""
    setattr(scheduler, _PACER, Pacer())


def pacer_of(scheduler: Any) -> Pacer | None:
    """Return the pacer of LMDeploy's scheduler, None where there is none."""
    pacer: Pacer | None = getattr(scheduler, _PACER, None)
    return pacer
