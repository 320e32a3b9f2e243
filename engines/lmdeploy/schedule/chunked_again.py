"""An answer that gave up its blocks and is computed again in chunks: until its last one it is no answer any more.

LMDeploy keeps a list of the answers that its next decode steps are for. Where none of them could go on, no step is
sent, and the list stays as it is. A prompt that is computed at once clears it of who ceased to answer; a first chunk
doesn't. So an answer that was the only one, and is computed again in chunks, would be decoded between its own chunks,
from another place than the model is at, and the engine would die of it.
"""

from collections.abc import Callable
from typing import Any

from engines.lmdeploy.guard import Guard


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


__all__ = ["task_schedule_prefill"]
