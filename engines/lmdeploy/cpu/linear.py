"""Matrix products laid out for decode: a few rows against weights that come from memory once per token.

With one row, torch calls a matrix-vector routine that walks each output's weights by itself, on one thread, at half of
what one core can read. Two changes, measured in ``docs/design/lmdeploy-cpu.md``:

- Weights are kept transposed in memory (the shape stays ``[out, in]``, the strides swap), so that the product is a sum
  of scaled rows, which streams. Prefill is indifferent to it.
- A few rows are multiplied as a batch of slices of the *input* dimension, one for each thread, and added up: torch
  spreads a batch over its threads, and a slice of a transposed weight is a view, so nothing is copied.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.default.linear import DefaultLinearImpl

FEW_ROWS = 8  # beyond this a plain product is as fast
MAX_SLICES = 8


class CpuLinear(DefaultLinearImpl):
    """An unquantised linear layer; ``threads`` is how many slices a product of few rows is cut into.

    On one thread a layer that narrows stays as it is: there torch's own routine is the quicker one.
    """

    def __init__(self, *, threads: int, in_features: int, out_features: int) -> None:
        self._slices = max(slices for slices in range(1, min(threads, MAX_SLICES) + 1) if in_features % slices == 0)
        self._transposes = self._slices > 1 or out_features >= in_features

    def update_weights(self, weight: Any, bias: Any = None) -> tuple[Any, Any]:
        """Transpose the loaded weight in place, so that a tied embedding still shares it."""
        if self._transposes:
            weight.data = weight.data.t().contiguous().t()
        return weight, bias

    def forward(self, x: Any, weight: Any, bias: Any = None, all_reduce: bool = False, *group: Any, **more: Any) -> Any:  # noqa: FBT001, FBT002
        """Return ``x @ weight.T + bias``, optionally reduced over a group."""
        slices = self._slices
        rows = x.numel() // x.size(-1)
        if all_reduce or slices == 1 or rows > FEW_ROWS or weight.stride(0) != 1:
            return super().forward(x, weight, bias, all_reduce, *group, **more)
        depth = x.size(-1) // slices
        parts = torch.bmm(
            x.reshape(rows, slices, depth).transpose(0, 1), weight.t().view(slices, depth, weight.size(0))
        )
        out = parts.sum(0) if slices > 2 else parts[0].add_(parts[1])  # noqa: PLR2004
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], weight.size(0))
