"""Attention kernels on a CUDA device, layer by layer: LMDeploy's decode kernel beside ours, and short prompts over long
histories with and without splits.

Random KV in a pool as LMDeploy lays it out, each kernel in a CUDA graph, medians of several replays. Bytes are those of
the KV that is read: K and V of every token once.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvcontrol.core.quantisation import KVQuantisation
from lab.bench.engine.quantised import policy_of

_POOL_BLOCKS: Final = 9000
_ROUNDS: Final = 5
_REPLAYS: Final = 20
_LENGTHS: Final = (
    (4096,),
    (57_344,),
    (1000, 100_000),
    (57_344,) * 6,
    (8_000, 20_000, 40_000, 60_000, 90_000, 110_000),
    (32_768,) * 16,
    (300, 2_000, 5_000, 8_000, 20_000, 40_000, 60_000, 90_000) * 2,
)
_PROMPTS: Final = ((64, 16_384), (64, 57_344), (64, 102_400), (256, 102_400), (1024, 102_400))


_FP8: Final = {KVQuantisation.FP8: "float8_e4m3fn", KVQuantisation.FP8_E5M2: "float8_e5m2"}


class UnavailableError(RuntimeError):
    """The kernels can't run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer's attention: query heads, KV heads, tokens of a page; ``dim`` numbers a head."""

    heads: int = 28
    kv_heads: int = 4
    dim: int = 128
    page: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """One layer's decode attention of these context lengths, in microseconds; ``difference`` is relative (norm)."""

    lengths: tuple[int, ...]
    stock_us: float
    ours_us: float
    ours_gb_per_s: float
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """One layer's attention of a prompt's new tokens over a history, in microseconds."""

    tokens: int
    history_tokens: int
    unsplit_us: float
    split_us: float


def decode_times(shape: Shape, quantisation: KVQuantisation = KVQuantisation.NONE) -> list[DecodeTimes]:
    """Time decode attention over KV in bfloat16 or fp8.

    Raises ``UnavailableError`` without CUDA, Triton or LMDeploy's kernels.
    """
    torch = _torch()
    try:
        from lmdeploy.pytorch.kernels.cuda import flash_attn_with_kvcache

        from engines.lmdeploy.attention.decode import attend
    except ImportError as error:
        raise UnavailableError(f"the kernels can't be imported: {error}") from error
    pool = torch.randn((_POOL_BLOCKS, 2, shape.page, shape.kv_heads, shape.dim), device="cuda").to(torch.bfloat16)
    quantised: dict[str, Any] = {}
    scales = None
    if quantisation is not KVQuantisation.NONE:
        pool = pool.to(getattr(torch, _FP8[quantisation]))
        scales = torch.ones((), device="cuda"), torch.ones((), device="cuda")
        quantised = {"quant_policy": policy_of(quantisation), "k_scales_zeros": scales[0], "v_scales_zeros": scales[1]}
    k, v, scale = pool[:, 0], pool[:, 1], shape.dim**-0.5
    found = []
    for lengths in _LENGTHS:
        batch, pages = len(lengths), max(lengths) // shape.page + 1
        table = torch.randint(0, _POOL_BLOCKS, (batch, pages), device="cuda", dtype=torch.int32)
        seqlens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        q = torch.randn((batch, shape.heads, shape.dim), device="cuda").to(torch.bfloat16)

        def stock(q: Any = q, seqlens: Any = seqlens, table: Any = table, starts: Any = starts) -> Any:
            return flash_attn_with_kvcache(
                q,
                k,
                v,
                cache_seqlens=seqlens,
                page_table=table,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                softmax_scale=scale,
                **quantised,
            )

        def ours(q: Any = q, seqlens: Any = seqlens, table: Any = table) -> Any:
            return attend(q, k, v, seqlens, table, scale, scales)

        expected = stock().float()
        ours_us = _graph_us(torch, ours)
        found.append(
            DecodeTimes(
                lengths=lengths,
                stock_us=_graph_us(torch, stock),
                ours_us=ours_us,
                ours_gb_per_s=sum(lengths) * shape.kv_heads * shape.dim * 2 * pool.itemsize / ours_us / 1e3,
                difference=float((ours().float() - expected).norm() / expected.norm()),
            )
        )
    return found


def prompt_times(shape: Shape) -> list[PromptTimes]:
    """Time FlashAttention-3 of short prompts; raises ``UnavailableError`` where it isn't installed."""
    torch = _torch()
    from engines.lmdeploy.attention import flash3

    what = flash3.provide()
    try:
        from lmdeploy.pytorch.third_party.flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise UnavailableError(f"prompts get {what}") from error
    found = []
    for tokens, history in _PROMPTS:
        q = torch.randn((tokens, shape.heads, shape.dim), device="cuda").to(torch.bfloat16)
        k, v = (torch.randn((history, shape.kv_heads, shape.dim), device="cuda").to(torch.bfloat16) for _ in range(2))
        starts = [torch.tensor([0, length], device="cuda", dtype=torch.int32) for length in (tokens, history)]

        def run(splits: int, q: Any = q, k: Any = k, v: Any = v, starts: Any = starts) -> Any:
            return flash_attn_varlen_func(
                q=q,
                k=k,
                v=v,
                cu_seqlens_q=starts[0],
                cu_seqlens_k=starts[1],
                max_seqlen_q=len(q),
                max_seqlen_k=len(k),
                softmax_scale=shape.dim**-0.5,
                causal=True,
                num_splits=splits,
            )

        unsplit_us, split_us = (_event_us(torch, run, splits) for splits in (1, 0))
        found.append(PromptTimes(tokens=tokens, history_tokens=history, unsplit_us=unsplit_us, split_us=split_us))
    return found


def _torch() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("there is no CUDA device here")
    return torch


def _graph_us(torch: Any, work: Callable[[], Any]) -> float:
    """Return the microseconds of ``work`` replayed from a CUDA graph, the median of several rounds."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return statistics.median(_round_us(torch, graph.replay) for _ in range(_ROUNDS))


def _event_us(torch: Any, work: Callable[[int], Any], splits: int) -> float:
    """Return the microseconds of ``work`` launched anew each time, the median of several rounds."""
    for _ in range(3):
        work(splits)
    return statistics.median(_round_us(torch, lambda: work(splits)) for _ in range(_ROUNDS))


def _round_us(torch: Any, work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(_REPLAYS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / _REPLAYS * 1e3
