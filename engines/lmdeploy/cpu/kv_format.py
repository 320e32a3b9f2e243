"""How keys and values lie in one layer's pages: as they are, or quantised to int8, int4 or fp8.

The layouts are LMDeploy's own (``cache_engine/schema.py``): int8 and int4 keep a scale and a zero point per token and
head beside the page, int4 packs the two halves of a head into one byte, fp8 divides by one scalar scale.
"""

from typing import Any, Protocol

import torch
from lmdeploy.messages import QuantPolicy


class KVFormat(Protocol):
    """Writes new tokens into pages and reads whole pages back.

    ``pages`` is ``[pages, page_tokens, heads, stored_width]``, ``scales`` whatever LMDeploy passes for this format.
    """

    def write(self, states: Any, pages: Any, scales: Any, page: Any, offset: Any) -> None:
        """Store ``states`` ``[tokens, heads, width]`` at slot ``(page, offset)`` of each token."""

    def read(self, pages: Any, scales: Any, page: Any, dtype: Any) -> Any:
        """Return the tokens of the named pages in order, ``[len(page) * page_tokens, heads, width]``."""


class Plain:
    """The model's own dtype; reading is one gather."""

    def write(self, states: Any, pages: Any, scales: Any, page: Any, offset: Any) -> None:
        del scales
        pages.index_put_((page, offset), states)

    def read(self, pages: Any, scales: Any, page: Any, dtype: Any) -> Any:
        del scales, dtype
        return pages.index_select(0, page).flatten(0, 1)


class Fp8:
    """8-bit floats with one scale for all."""

    def write(self, states: Any, pages: Any, scales: Any, page: Any, offset: Any) -> None:
        pages[page, offset] = (states.float() / scales).to(pages.dtype)

    def read(self, pages: Any, scales: Any, page: Any, dtype: Any) -> Any:
        return (pages[page].flatten(0, 1).float() * scales).to(dtype)


class Int:
    """Unsigned 8- or 4-bit integers with a scale and a zero point for each token and head."""

    def __init__(self, *, bits: int) -> None:
        self._bits = bits
        self._top = float((1 << bits) - 1)

    def write(self, states: Any, pages: Any, scales: Any, page: Any, offset: Any) -> None:
        values = states.float()
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        scale = ((high - low) / self._top).clamp_min(1e-8)
        zero = -low / scale
        stored = (values / scale + zero + 0.5).clamp(0, self._top).to(torch.uint8)
        if self._bits == 4:  # noqa: PLR2004
            first, second = stored.chunk(2, -1)
            stored = first | (second << 4)
        pages[page, offset] = stored
        scales[page, offset] = torch.cat([scale, zero], -1).to(scales.dtype)

    def read(self, pages: Any, scales: Any, page: Any, dtype: Any) -> Any:
        stored = pages[page].flatten(0, 1)
        scale_zero = scales[page].flatten(0, 1).float()
        if self._bits == 4:  # noqa: PLR2004
            stored = torch.cat([stored & 0xF, stored >> 4], -1)
        return ((stored.float() - scale_zero[..., 1:2]) * scale_zero[..., 0:1]).to(dtype)


_FORMATS: dict[Any, KVFormat] = {
    QuantPolicy.NONE: Plain(),
    QuantPolicy.INT8: Int(bits=8),
    QuantPolicy.INT4: Int(bits=4),
    QuantPolicy.FP8: Fp8(),
    QuantPolicy.FP8_E5M2: Fp8(),
}


def format_of(policy: Any) -> KVFormat:
    """Return the format of a ``quant_policy``; raises ``NotImplementedError`` naming it when the CPU has none."""
    try:
        return _FORMATS[policy]
    except KeyError:
        known = ", ".join(f"{int(each)} ({each.name})" for each in _FORMATS)
        raise NotImplementedError(f"quant_policy {policy!r} has no CPU implementation, there are: {known}") from None
