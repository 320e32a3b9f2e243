"""Selects the kernel of decode attention: ours where it is supported and verified, else LMDeploy's own.

Ours is compared with LMDeploy's on random KV before the first step of each shape. A kernel that doesn't compile, raises
or differs is left out, with the reason in the log: an instance never fails for it.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from engines.lmdeploy.attention import flash3, overlapped

_LEAST_DIM: Final = 16
_MOST_PAGE: Final = 128
_TOLERANCE: Final = 0.01
"""Relative difference (norm) from LMDeploy's kernel; two bfloat16 kernels differ by about 0.003."""
_FP8_POLICIES: Final = (16, 17)
"""LMDeploy's ``QuantPolicy`` of KV in fp8 with one scale for all: e4m3 and e5m2."""
_log = logging.getLogger("lmdeploy.kvgate")


class PagedAttention:
    """LMDeploy's ``flash_attn_with_kvcache`` of one layer, with our kernel where supported. The engine's thread."""

    def __init__(self, stock: Callable[..., Any], verdicts: dict[tuple[Any, ...], str | None]) -> None:
        self._stock = stock
        self._verdicts = verdicts

    def __call__(self, q: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
        """Return the attention of the step's query tokens; LMDeploy's arguments."""
        if not _serves(q, k_cache, v_cache, options):
            return self._stock(q, k_cache, v_cache, **options)
        shape = (tuple(q.shape[1:]), tuple(k_cache.shape[1:]), v_cache.shape[3], q.dtype, k_cache.dtype, q.device)
        scales = _fp8_scales(options)
        if shape not in self._verdicts:
            self._verdicts[shape] = _problem(self._stock, q, k_cache, v_cache, options)
            _log_verdict(shape, self._verdicts[shape])
        if self._verdicts[shape] is not None:
            return self._stock(q, k_cache, v_cache, **options)
        from engines.lmdeploy.attention.decode import attend

        scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
        return attend(q, k_cache, v_cache, options["cache_seqlens"], options["page_table"], scale, scales)


def _serves(q: Any, k_cache: Any, v_cache: Any, options: dict[str, Any]) -> bool:
    """Whether our kernel computes this: one token a sequence, KV of the query's type or fp8, no window, no bias."""
    window = options.get("window_size")
    if isinstance(window, tuple | list):
        window = window[0]
    page, kv_heads, dim = k_cache.shape[1:]
    return (
        q.shape[0] == options["cache_seqlens"].shape[0]
        and k_cache.dtype == v_cache.dtype
        and _is_known_type(q, k_cache, options)
        and (window is None or window <= 0)
        and not (options.get("softcap") or 0.0) > 0.0
        and options.get("alibi_slopes") is None
        and options.get("sinks") is None
        and q.dtype.itemsize == 2  # noqa: PLR2004 - bfloat16 and float16, which tensor cores multiply as they are
        and all(_power_of_two(n) and n >= _LEAST_DIM for n in (page, dim, v_cache.shape[3]))
        and page <= _MOST_PAGE
        and q.shape[1] % kv_heads == 0
        and k_cache.data_ptr() != v_cache.data_ptr()
        and q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    )


def _is_known_type(q: Any, k_cache: Any, options: dict[str, Any]) -> bool:
    policy = int(options.get("quant_policy") or 0)
    if policy in _FP8_POLICIES:
        scales = options.get("k_scales_zeros"), options.get("v_scales_zeros")
        return k_cache.dtype.itemsize == 1 and all(each is not None and each.numel() == 1 for each in scales)
    return policy == 0 and q.dtype == k_cache.dtype


def _fp8_scales(options: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return the scales of keys and values that are stored in fp8, None for others."""
    if int(options.get("quant_policy") or 0) not in _FP8_POLICIES:
        return None
    return options["k_scales_zeros"], options["v_scales_zeros"]


def _quantisation(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of LMDeploy's arguments that say how KV is stored."""
    return {name: options[name] for name in ("quant_policy", "k_scales_zeros", "v_scales_zeros") if name in options}


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _problem(stock: Callable[..., Any], q: Any, k_cache: Any, v_cache: Any, options: dict[str, Any]) -> str | None:
    """Compare both kernels on random KV of unequal lengths; return why ours is not used, None if it is correct."""
    import torch

    page, kv_heads, dim = k_cache.shape[1:]
    lengths = [1, page, 5 * page + 3, 40 * page + 1]
    blocks = lengths[-1] // page + 2

    def like(cache: Any) -> Any:
        # A page of K and one of V lie side by side, as in LMDeploy's pool.
        pool = torch.randn((blocks, 2, page, kv_heads, cache.shape[3]), device=q.device)
        return pool.to(cache.dtype)[:, 0]

    try:
        if torch.cuda.is_current_stream_capturing():
            return "the first step of this shape was captured into a graph, where nothing can be compared"
        from engines.lmdeploy.attention.decode import attend

        query = torch.randn((len(lengths), *q.shape[1:]), device=q.device).to(q.dtype)
        k, v = like(k_cache), like(v_cache)
        table = torch.stack([torch.randperm(blocks, device=q.device) for _ in lengths]).int()
        seqlens = torch.tensor(lengths, device=q.device, dtype=torch.int32)
        starts = torch.arange(len(lengths) + 1, device=q.device, dtype=torch.int32)
        scale = dim**-0.5
        ours = attend(query, k, v, seqlens, table, scale, _fp8_scales(options)).float()
        theirs = stock(
            query,
            k,
            v,
            cache_seqlens=seqlens,
            page_table=table,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            softmax_scale=scale,
            **_quantisation(options),
        ).float()
        difference = float((ours - theirs).norm() / theirs.norm())
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and LMDeploy's kernel serves
        return f"it failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not difference <= _TOLERANCE:  # NaN, too
        return f"it differs from LMDeploy's by {difference:.3g} (relative; at most {_TOLERANCE})"
    return None


def _log_verdict(shape: tuple[Any, ...], problem: str | None) -> None:
    heads, dim = shape[0]
    stored = str(shape[4]).removeprefix("torch.")
    what = f"{heads} query heads of {dim}, pages of {shape[1][0]} tokens, KV in {stored}"
    if problem is None:
        _log.info("decode attention (%s): kvgate's kernel in equal pieces", what)
    else:
        _log.warning("decode attention (%s): LMDeploy's own kernel; kvgate's is left out because %s", what, problem)


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def build_paged_attention(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_build_paged_attention``, in the engine process: an implementation computes decode steps with our kernel."""
    verdicts: dict[tuple[Any, ...], str | None] = {}
    built: set[str] = set()
    first_call = flash3.FirstCall()

    def build(spec: Any) -> Any:
        implementation = original(spec)
        kind = type(implementation).__name__
        if kind not in built:
            built.add(kind)
            _log.info("attention of prompts: %s (kvgate doctor lists why)", kind)
        if hasattr(implementation, "flash_attn_varlen_func_v3"):
            flash3.split_short_prompts(implementation)
            first_call.watch(implementation)
            if flash3.is_packaged():
                flash3.keep_to_what_it_can(implementation, spec)
        if hasattr(implementation, "_forward_prefill"):
            overlapped.launch_in_parts(implementation)
        if hasattr(implementation, "paged_attention_fwd"):
            implementation.paged_attention_fwd = PagedAttention(implementation.paged_attention_fwd, verdicts)
        return implementation

    return build
