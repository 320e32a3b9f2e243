"""FlashAttention-3 for prompts: LMDeploy looks for ``flash_attn_interface``, the package on PyPI has another name.

``fa3-fwd`` (the extra ``kvgate[cuda]``) is built for Hopper, bfloat16 and layers without a sliding window, and it
can't read pages: LMDeploy's Triton kernel serves the rest, and speculative decoding is refused at start.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from engines.lmdeploy.attention.overlapped import launch
from engines.lmdeploy.graphs import reason

_WANTED: Final = "flash_attn_interface"
_PACKAGED: Final = "fa3_fwd_interface"
_HOPPER: Final = (9, 0)
_SHORT_PROMPT_TOKENS: Final = 256
_BY_ITS_HEURISTIC: Final = 0
_log = logging.getLogger("lmdeploy.kvgate")


def provide() -> str:
    """Let LMDeploy find FlashAttention-3 where ``fa3-fwd`` is installed; return which kernel prompts get, and why.

    Must run before LMDeploy's attention is imported. It never raises: without the library LMDeploy's own kernel serves.
    """
    import torch

    if importlib.util.find_spec(_WANTED) is not None:
        return f"FlashAttention-3 ({_WANTED})"
    if torch.cuda.get_device_capability() != _HOPPER:
        return "LMDeploy's Triton kernel: fa3-fwd is built for Hopper GPUs"
    if importlib.util.find_spec(_PACKAGED) is None:
        return "LMDeploy's Triton kernel, 15 to 18 % slower for long prompts: fa3-fwd isn't installed (kvgate[cuda])"
    try:
        sys.modules[_WANTED] = importlib.import_module(_PACKAGED)
    except (ImportError, OSError, RuntimeError) as error:
        return f"LMDeploy's Triton kernel: fa3-fwd can't be loaded ({error})"
    return "FlashAttention-3 (fa3-fwd)"


def is_packaged() -> bool:
    """Whether the FlashAttention-3 that LMDeploy finds is ``fa3-fwd``."""
    return getattr(sys.modules.get(_WANTED), "__name__", None) == _PACKAGED


def split_short_prompts(implementation: Any) -> None:
    """Let a layer split the history of a short prompt (without, one CTA a head walks 100,000 tokens alone), and leave
    multiprocessors to decode steps beside an overlapping chunk.

    Measured on an H200 (28 heads, 4 KV heads), 64 tokens over a history of 102,400: 1,098 us a layer without splits,
    197 with; 256 tokens: 1,089 and 849; from 512 on splitting costs up to 13 %.
    """
    flash = implementation.flash_attn_varlen_func_v3

    def flash_attn_varlen(*arguments: Any, max_seqlen_q: int, **more: Any) -> Any:
        splits = _BY_ITS_HEURISTIC if max_seqlen_q <= _SHORT_PROMPT_TOKENS else 1
        margin = launch.reserved_multiprocessors
        return flash(*arguments, max_seqlen_q=max_seqlen_q, num_splits=splits, sm_margin=margin, **more)

    implementation.flash_attn_varlen_func_v3 = flash_attn_varlen


def keep_to_what_it_can(implementation: Any, spec: Any) -> None:
    """Let a layer compute supported shapes with ``fa3-fwd``, and others with LMDeploy's Triton kernel."""
    import torch
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl

    flash = implementation._forward_prefill  # noqa: SLF001 - LMDeploy's, which the hook extends
    triton = MethodType(TritonAttentionImpl._forward_prefill, implementation)  # noqa: SLF001
    window = spec.sliding_window[0] if isinstance(spec.sliding_window, tuple | list) else spec.sliding_window
    windowed = window is not None and window >= 0

    def forward_prefill(query: Any, *arguments: Any, **more: Any) -> Any:
        chosen = triton if windowed or query.dtype is not torch.bfloat16 else flash
        return chosen(query, *arguments, **more)

    implementation._forward_prefill = forward_prefill  # noqa: SLF001


class FirstCall:
    """Whether FlashAttention-3 works, as its first call in any layer shows: LMDeploy's Triton kernel serves if not."""

    def __init__(self) -> None:
        self._works: bool | None = None

    def watch(self, implementation: Any) -> None:
        """Let a layer compute its prompts with LMDeploy's Triton kernel where the first call fails."""
        from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl

        flash = implementation._forward_prefill  # noqa: SLF001 - LMDeploy's, which the hook extends
        triton = MethodType(TritonAttentionImpl._forward_prefill, implementation)  # noqa: SLF001

        def forward_prefill(*arguments: Any, **more: Any) -> Any:
            if self._works is None:
                try:
                    output = flash(*arguments, **more)
                except Exception as error:  # noqa: BLE001 - a library may raise anything, and Triton's kernel serves
                    self._works = False
                    _log.warning("attention of prompts: LMDeploy's Triton kernel; FlashAttention-3: %s", reason(error))
                else:
                    self._works = True
                    return output
            return (flash if self._works else triton)(*arguments, **more)

        implementation._forward_prefill = forward_prefill  # noqa: SLF001


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def require_for_speculation(original: Callable[[], None]) -> Callable[[], None]:
    """``require_fa3_for_speculative_decoding``: ``fa3-fwd`` isn't enough, since it can't read pages."""

    def require() -> None:
        if is_packaged():
            raise RuntimeError(
                "speculative decoding needs a FlashAttention-3 that reads paged KV (flash_attn_interface); "
                "fa3-fwd is built without pages"
            )
        original()

    return require
