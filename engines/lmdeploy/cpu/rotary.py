"""Rotary position embeddings without a compiler."""

from inspect import unwrap
from typing import Any


def uncompiled(original: Any) -> Any:
    """Replace the compiled rotary function by the function inside it.

    ``torch.compile`` would want a C++ compiler and ten seconds at first use, for a table of a few thousand numbers.
    """
    return unwrap(original)


__all__ = ["uncompiled"]
