"""Long prompts that a shorter one overtakes between two of their chunks.

LMDeploy computes the chunks of one long prompt at a time: its chunker holds that prompt until the last chunk. A prompt
that is longer than a chunk, too, waits for it, even if it has much less left to compute. Here the long prompt is parked
between two chunks: it keeps its blocks, its place in the chunker is saved, and the waiting prompt is scheduled alone,
in chunks or at once. After its last chunk the parked prompt goes on where it was. Which prompt overtakes is a question
to the pace (``kvcontrol.scheduler_ir.pacing.overtaking``).

What may happen meanwhile:

- A parked prompt stays *running* for LMDeploy: nobody takes its blocks. It is dropped here as soon as it is not running
  any more (cancelled, or preempted for a weight update).
- The overtaking prompt finds no room for its next chunk: it gives up its blocks, waits as before, and the prompt that
  it had overtaken goes on. So two prompts never wait for each other's blocks. It doesn't overtake again before all long
  prompts are computed.
- The engine goes to sleep: nothing is parked any more, as nothing is active.
- The model keeps state from a chunk to the next one for log-probabilities of prompts, for pictures, for recurrent and
  draft models. These prompts don't overtake and are not overtaken.
"""

from dataclasses import dataclass
from typing import Any, Final

from engines.lmdeploy.schedule.scheduler import queue_of
from engines.lmdeploy.schedule.uncached import left_tokens
from engines.lmdeploy.schedule.urgency import urgency_of_sequence
from kvcontrol.scheduler_ir.pacing import LongPrompt, WaitingPrompt, overtaker

_OVERTAKEN: Final = "kvgate_overtaken"
_CHUNKER_STATE: Final = ("seq", "multimodals", "next_step", "max_prefill_num", "has_multimodal")


@dataclass(slots=True)
class _Overtaken:
    """How many tokens of others may go before the rest of a prompt, and how many went."""

    allowed_tokens: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Parked:
    seq: Any
    state: dict[str, Any]


class Overtaking:
    """The parked prompts of one engine, the one that was overtaken last at the end. The engine's thread."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []
        self._refused: set[int] = set()
        self.count = self.gave_way = 0

    @property
    def has_parked(self) -> bool:
        """Whether a prompt waits to go on."""
        return any(_is_running(parked.seq) for parked in self._parked)

    def forget(self) -> None:
        """No prompt is parked any more: the engine has dropped them all."""
        self._parked.clear()
        self._refused.clear()

    def resume(self, chunker: Any) -> None:
        """Go on with the prompt that was overtaken last, unless another one is active. Only before a step is made:
        until then LMDeploy notes the chunk that it sent.
        """
        chunker.check_enable()
        self._parked = [parked for parked in self._parked if _is_running(parked.seq)]
        if chunker.enabled():
            return
        if not self._parked:
            self._refused.clear()
            return
        _restore(chunker, self._parked.pop())

    def chosen(self, maker: Any, share: float) -> Any | None:
        """Return the waiting sequence that runs before the active one's next chunk, None for the chunk."""
        scheduler, chunker = maker.scheduler, maker.long_context_chunker
        active = chunker.seq
        queue = queue_of(scheduler)
        if queue is None or queue.failed or chunker.is_last_chunk() or chunker.has_multimodal or not _is_plain(active):
            return None
        waiting = [seq for seq in scheduler.waiting if int(seq.seq_id) not in self._refused and _is_plain(seq)]
        place = overtaker(
            _long(active, share),
            [_long(parked.seq, share) for parked in self._parked],
            [WaitingPrompt(left_tokens=left_tokens(scheduler, seq), priority=_priority(seq)) for seq in waiting],
        )
        return None if place is None else waiting[place]

    def overtake(self, task: Any, seq: Any, share: float) -> bool:
        """Schedule one waiting sequence before the active one's next chunk and return whether it is computed now."""
        scheduler, chunker = task.scheduler, task.maker.long_context_chunker
        queue = queue_of(scheduler)
        assert queue is not None  # noqa: S101 - ``chosen`` looked
        active = _Parked(chunker.seq, {name: getattr(chunker, name) for name in _CHUNKER_STATE})
        chunker.clear()
        with queue.showing(seq):
            result = task._schedule_prefill(allow_long_prefill=True, prefer_long_prefill=True)  # noqa: SLF001
        if result.inputs is None:  # it has no room, or begins to be loaded
            _restore(chunker, active)
            loads = scheduler.kv_load_coordinator
            if _is_waiting(seq) and not loads.is_lookup_pending(seq):
                self._refused.add(int(seq.seq_id))
            return False
        task.result = result
        self.count += 1
        for each in (active, *self._parked):
            _bound(each.seq, share).tokens += int(seq.num_token_ids)
        if chunker.enabled():
            self._parked.append(active)
        else:
            _restore(chunker, active)
        return True

    def give_way(self, task: Any) -> bool:
        """Let the active prompt, which has no room, go back to wait, and the one that it overtook go on; False where it
        overtook none.
        """
        chunker = task.maker.long_context_chunker
        if not (self._parked and chunker.enabled()):
            return False
        scheduler, seq = task.scheduler, chunker.seq
        chunker.clear()
        scheduler.preempt_seqs((seq,))
        scheduler.eviction_helper._reclaim_candidate(seq)  # noqa: SLF001
        self._refused.add(int(seq.seq_id))
        self.gave_way += 1
        self.resume(chunker)
        return bool(chunker.enabled())


def can_overtake(maker: Any) -> bool:
    """Return whether chunks of one prompt leave nothing in the model that chunks of another would take away."""
    from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy

    return is_plain_model(maker.config) and type(maker.model_agent_strategy) is ARModelAgentStrategy


def is_plain_model(config: Any) -> bool:
    """Return whether a model has no recurrent state, no draft model and no multimodal positions."""
    return not (config.is_ssm or config.spec_decoding or config.use_mrope)


def _is_plain(seq: Any) -> bool:
    has_pictures = not seq.history_multimodals.empty() or len(seq.history_embeddings) > 0
    keeps_logits = int(seq.logprob_start_pos) >= 0 or seq.return_logits or seq.return_ce_loss
    return not (has_pictures or keeps_logits or seq.return_routed_experts)


def _is_running(seq: Any) -> bool:
    from lmdeploy.pytorch.messages import MessageStatus

    return bool(seq.status is MessageStatus.RUNNING)


def _is_waiting(seq: Any) -> bool:
    from lmdeploy.pytorch.messages import MessageStatus

    return bool(seq.status is MessageStatus.WAITING)


def _priority(seq: Any) -> int:
    return urgency_of_sequence(seq).priority.level


def _long(seq: Any, share: float) -> LongPrompt:
    bound: _Overtaken | None = getattr(seq, _OVERTAKEN, None)
    left = int(seq.num_token_ids)
    yields = int(left * share) if bound is None else bound.allowed_tokens - bound.tokens
    return LongPrompt(left_tokens=left, yields_tokens=yields, priority=_priority(seq))


def _bound(seq: Any, share: float) -> _Overtaken:
    bound: _Overtaken | None = getattr(seq, _OVERTAKEN, None)
    if bound is None:
        bound = _Overtaken(int(int(seq.num_token_ids) * share))
        setattr(seq, _OVERTAKEN, bound)
    return bound


def _restore(chunker: Any, parked: _Parked) -> None:
    for name, value in parked.state.items():
        setattr(chunker, name, value)
