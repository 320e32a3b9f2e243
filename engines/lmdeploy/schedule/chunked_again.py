"""Keeps a prompt in chunks out of LMDeploy's list of running answers until its last chunk.

LMDeploy keeps a list of the answers that its next decode steps are for. An answer may give up its blocks and be
computed again in chunks. Where none of them could go on, no step is
sent, and the list stays as it is. A prompt that is computed at once clears it of who ceased to answer; a first chunk
doesn't. So an answer that was the only one, and is computed again in chunks, would be decoded between its own chunks,
from another place than the model is at, and the engine would die of it.

A prompt that is cancelled while one of its chunks is under way leaves LMDeploy's chunker, which alone knows that the
chunk is one. LMDeploy then takes the prompt for an answer. In an engine that has answered nothing yet the model has no
answers to take it from, and the engine would die of the next prompt.
"""

from collections.abc import Callable
from typing import Any

from engines.control.guard import Guard


def task_schedule_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_ForwardInputsTask._schedule_prefill``: with a first chunk, too, the list is cleared, here and in the model."""
    guard = Guard("the list of answers")

    def _schedule_prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if result.inputs is not None and result.inputs.is_chunk:
            guard("clear itself", None, _clear, self.maker, result)
        return result

    return _schedule_prefill


def _clear(maker: Any, result: Any) -> None:
    (chunked,) = result.running
    if any(seq is chunked for seq in maker.running_seqs):
        result.delta, maker.running_seqs, _ = maker.create_model_inputs_delta_valid_only()


def maker_update_running_seqs(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``InputsMakerAsync.update_running_seqs``: a chunk that is not the last one makes no answer."""

    def update_running_seqs(self: Any, running: Any, inputs: Any) -> None:
        is_part = inputs is not None and inputs.is_chunk and not inputs.is_last_chunk
        if is_part and not self.long_context_chunker.enabled():
            return
        original(self, running, inputs)

    return update_running_seqs
