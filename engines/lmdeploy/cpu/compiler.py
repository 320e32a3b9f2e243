"""``torch.compile`` left out: LMDeploy's compiled helpers run as the plain functions that they are.

Inductor would want a C++ compiler and ten seconds at first use, for a rotary table of a few thousand numbers.
"""

from typing import Any


def uncompiled(original: Any) -> Any:
    """Replace ``torch.compile``, as a function and as a decorator with or without arguments."""
    del original

    def compile_nothing(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    return compile_nothing
