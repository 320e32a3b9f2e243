"""Which sizes of KV blocks LMDeploy's PyTorch engine runs; another one would fail in it after the model is loaded."""

from collections.abc import Sequence
from typing import Final

from kvgate.failure import CommandError

LEAST_BLOCK_TOKENS: Final = 16
MOST_BLOCK_TOKENS: Final = 4096
_KERNEL_OPTION: Final = "--kernel-block-size"


def need_possible_block_size(tokens: int | None, *, option: str = "--block-size", extra: Sequence[str] = ()) -> None:
    """Raise ``CommandError`` for a size that the engine can't run.

    ``extra`` are options for LMDeploy: with ``--kernel-block-size`` a block is any multiple of that.
    """
    if tokens is None:
        return
    kernel = any(each.partition("=")[0] == _KERNEL_OPTION for each in extra)
    possible = tokens % LEAST_BLOCK_TOKENS == 0 if kernel else tokens & (tokens - 1) == 0
    if not LEAST_BLOCK_TOKENS <= tokens <= MOST_BLOCK_TOKENS or not possible:
        raise CommandError(
            f"{option} is {tokens}; the engine runs blocks of {LEAST_BLOCK_TOKENS} to {MOST_BLOCK_TOKENS} tokens, "
            f"a power of two (or, with {_KERNEL_OPTION}, a multiple of {LEAST_BLOCK_TOKENS})",
            "use 16 on CPU, 64 on GPU",
        )
