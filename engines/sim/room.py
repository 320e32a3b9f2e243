"""Which requests an engine could ever serve."""

from engines.sim.profile import EngineShape


class DoesNotFitError(ValueError):
    """A request that this engine could never serve; the message says what is allowed."""


def need_room(shape: EngineShape, prompt_tokens: int, output_tokens: int) -> None:
    """Raise ``DoesNotFitError`` for a request that could never be served."""
    if prompt_tokens < 1 or output_tokens < 1:
        raise DoesNotFitError(
            f"a prompt of {prompt_tokens} tokens and an answer of {output_tokens}; there must be 1 of each"
        )
    total = prompt_tokens + output_tokens
    capacity = min(shape.context_tokens, shape.hbm_blocks * shape.block_tokens)
    if total > capacity:
        raise DoesNotFitError(
            f"{prompt_tokens} prompt tokens and {output_tokens} to answer; at most {capacity} together"
        )
