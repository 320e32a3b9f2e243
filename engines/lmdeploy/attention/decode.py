"""Decode attention over paged KV in equal pieces: each CTA reads the same number of pages, whatever the lengths.

LMDeploy's kernel cuts every sequence of a batch into the same number of splits, so the longest context alone decides
how long a layer takes. Here the pages of *all* sequences are shared out: a piece is so many pages that all pieces of
one KV head fit on the device at once, and a sequence gets as many pieces as its length needs. Both kernels derive the
pieces from the lengths on the device, so a captured CUDA graph serves any lengths without a plan made on the host.
The arithmetic is that of FlashDecoding (Dao et al., 2023): partial outputs, each with its log-sum-exp, then a merge.

KV in fp8 is multiplied in float16, which holds every value of e4m3 and e5m2 and costs one conversion.

Needs Triton and a CUDA device; nothing imports this module where there is none.
"""

import functools
import math

import torch
import triton
import triton.language as tl

CTAS_PER_SM = 4
"""CTAs of the first kernel for each multiprocessor. Measured on an H200: 2 reach 4.0 TB/s, 3 and 4 reach 4.2 TB/s."""
FP8_CTAS_PER_SM = 3
"""The same for KV in fp8, whose kernel needs more registers: a fourth would wait. 3 take 128 us, 4 take 167."""
_LEAST_PAGES = 2
"""A piece is no shorter: below that the merge costs more than the split gains."""
_MERGED_AT_ONCE = 32
_LOG2_E = math.log2(math.e)


@triton.jit
def _pieces(
    lengths_ptr,
    batch: tl.constexpr,
    rows_padded: tl.constexpr,
    pieces: tl.constexpr,
    page: tl.constexpr,
    least: tl.constexpr,
):
    """Return lengths, pages a piece, pieces and their running total by sequence; the total is at most ``pieces``."""
    rows = tl.arange(0, rows_padded)
    lengths = tl.load(lengths_ptr + rows, mask=rows < batch, other=0).to(tl.int32)
    pages = tl.cdiv(lengths, page)
    each = tl.maximum(tl.cdiv(tl.sum(pages, 0), pieces - batch), least)
    counts = tl.cdiv(pages, each)
    return lengths, each, counts, tl.cumsum(counts, 0)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    table_ptr,
    partial_ptr,
    weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    table_stride,
    stride_q: tl.constexpr,
    stride_qh: tl.constexpr,
    stride_kp: tl.constexpr,
    stride_kt: tl.constexpr,
    stride_kh: tl.constexpr,
    stride_vp: tl.constexpr,
    stride_vt: tl.constexpr,
    stride_vh: tl.constexpr,
    batch: tl.constexpr,
    rows_padded: tl.constexpr,
    pieces: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    group_padded: tl.constexpr,
    dim: tl.constexpr,
    dim_v: tl.constexpr,
    page: tl.constexpr,
    least: tl.constexpr,
    overlap: tl.constexpr,
    is_fp8: tl.constexpr,
):
    """One piece of one sequence for the query heads of one KV head: its output, and log2 of its sum of weights."""
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    lengths, each, counts, ends = _pieces(lengths_ptr, batch, rows_padded, pieces, page, least)
    rows = tl.arange(0, rows_padded)
    row = tl.sum((ends <= piece).to(tl.int32), 0)
    if row < batch:
        mine = rows == row
        length = tl.sum(tl.where(mine, lengths, 0), 0)
        first = (piece - tl.sum(tl.where(mine, ends - counts, 0), 0)) * each
        last = tl.minimum(first + each, tl.cdiv(length, page))

        offs_g = tl.arange(0, group_padded)
        head = kv_head * group + offs_g
        mask_g = offs_g < group
        offs_n = tl.arange(0, page)
        offs_d = tl.arange(0, dim)
        offs_v = tl.arange(0, dim_v)
        q = tl.load(q_ptr + row * stride_q + head[:, None] * stride_qh + offs_d[None, :], mask=mask_g[:, None], other=0)
        if is_fp8:
            # With the scale in it no query leaves float16's range.
            q = (q.to(tl.float32) * (scale * tl.load(k_scale_ptr))).to(tl.float16)
        k_ptrs = k_ptr + kv_head * stride_kh + offs_n[None, :] * stride_kt + offs_d[:, None]
        v_ptrs = v_ptr + kv_head * stride_vh + offs_n[:, None] * stride_vt + offs_v[None, :]
        table = table_ptr + row.to(tl.int64) * table_stride

        most = tl.full([group_padded], -float("inf"), dtype=tl.float32)
        total = tl.zeros([group_padded], dtype=tl.float32)
        acc = tl.zeros([group_padded, dim_v], dtype=tl.float32)
        for index in range(first, last):
            block = tl.load(table + index).to(tl.int64)
            k = tl.load(k_ptrs + block * stride_kp)
            v = tl.load(v_ptrs + block * stride_vp)
            if is_fp8:
                scores = tl.dot(q, k.to(tl.float16))
                v = v.to(tl.float16)
            else:
                scores = tl.dot(q, k) * scale
            scores = tl.where((index * page + offs_n < length)[None, :], scores, -float("inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(most - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            most = higher

        if is_fp8:
            acc = acc * tl.load(v_scale_ptr)
        out = piece * heads + head
        tl.store(partial_ptr + out[:, None] * dim_v + offs_v[None, :], acc / total[:, None], mask=mask_g[:, None])
        tl.store(weight_ptr + out, most + tl.log2(total), mask=mask_g)
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _merge_kernel(
    partial_ptr,
    weight_ptr,
    lengths_ptr,
    out_ptr,
    stride_o: tl.constexpr,
    stride_oh: tl.constexpr,
    batch: tl.constexpr,
    rows_padded: tl.constexpr,
    pieces: tl.constexpr,
    pieces_padded: tl.constexpr,
    heads: tl.constexpr,
    dim_v: tl.constexpr,
    page: tl.constexpr,
    least: tl.constexpr,
    at_once: tl.constexpr,
    overlap: tl.constexpr,
):
    """Add up the pieces of one sequence for one head; a sequence of no tokens gets zeros."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    _, _, counts, ends = _pieces(lengths_ptr, batch, rows_padded, pieces, page, least)
    mine = tl.arange(0, rows_padded) == row
    count = tl.sum(tl.where(mine, counts, 0), 0)
    begin = tl.sum(tl.where(mine, ends - counts, 0), 0)
    offs_v = tl.arange(0, dim_v)
    if overlap:
        tl.extra.cuda.gdc_wait()
    offs_p = tl.arange(0, pieces_padded)
    weights = tl.load(weight_ptr + (begin + offs_p) * heads + head, mask=offs_p < count, other=-float("inf"))
    most = tl.maximum(tl.max(weights, 0), -1e30)
    total = tl.sum(tl.exp2(weights - most), 0)
    acc = tl.zeros([dim_v], dtype=tl.float32)
    offs_c = tl.arange(0, at_once)
    for start in range(0, count, at_once):
        inside = start + offs_c < count
        place = (begin + start + offs_c) * heads + head
        weight = tl.load(weight_ptr + place, mask=inside, other=-float("inf"))
        part = tl.load(partial_ptr + place[:, None] * dim_v + offs_v[None, :], mask=inside[:, None], other=0.0)
        acc += tl.sum(part * tl.exp2(weight - most)[:, None], 0)
    tl.store(out_ptr + row * stride_o + head * stride_oh + offs_v, acc / tl.maximum(total, 1e-30))


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    fp8_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the attention of one query token a sequence, ``[batch, heads, dim_v]``.

    ``q`` is ``[batch, heads, dim]``, the caches ``[blocks, page, kv_heads, dim]`` and ``[blocks, page, kv_heads,
    dim_v]``, ``lengths`` ``[batch]`` tokens (integers), ``page_table`` ``[batch, pages]``; the last axis of each is
    contiguous. Dimensions and pages are powers of two from 16. Caches in fp8 come with ``fp8_scales``, float32 scalars
    on the device by which stored keys and values are multiplied. The call allocates scratch of
    ``pieces * heads * (dim_v + 1)`` floats and doesn't wait for the device.
    """
    batch, heads, dim = q.shape
    page, kv_heads, dim_v = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    multiprocessors, overlap = _device(q.device)
    ctas = multiprocessors * (CTAS_PER_SM if fp8_scales is None else FP8_CTAS_PER_SM)
    pieces = max(ctas // kv_heads, 2 * batch)
    partial = torch.empty((pieces, heads, dim_v), dtype=torch.float32, device=q.device)
    weight = torch.empty((pieces, heads), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, heads, dim_v), dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    k_scale, v_scale = fp8_scales or (lengths, lengths)  # the kernel reads them with fp8 alone
    shared = {
        "batch": batch,
        "rows_padded": triton.next_power_of_2(batch),
        "pieces": pieces,
        "heads": heads,
        "dim_v": dim_v,
        "page": page,
        "least": _LEAST_PAGES,
        "overlap": overlap,
    }
    _attend_kernel[(kv_heads, pieces)](
        q,
        k_cache,
        v_cache,
        lengths,
        page_table,
        partial,
        weight,
        k_scale,
        v_scale,
        softmax_scale * _LOG2_E,
        page_table.stride(0),
        stride_q=q.stride(0),
        stride_qh=q.stride(1),
        stride_kp=k_cache.stride(0),
        stride_kt=k_cache.stride(1),
        stride_kh=k_cache.stride(2),
        stride_vp=v_cache.stride(0),
        stride_vt=v_cache.stride(1),
        stride_vh=v_cache.stride(2),
        group=group,
        group_padded=max(16, triton.next_power_of_2(group)),
        dim=dim,
        is_fp8=fp8_scales is not None,
        num_warps=4,
        num_stages=3,
        **shared,
    )
    _merge_kernel[(heads, batch)](
        partial,
        weight,
        lengths,
        out,
        stride_o=out.stride(0),
        stride_oh=out.stride(1),
        pieces_padded=triton.next_power_of_2(pieces),
        at_once=_MERGED_AT_ONCE,
        num_warps=4,
        num_stages=1,
        **shared,
        **({"launch_pdl": True} if overlap else {}),
    )
    return out


@functools.lru_cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Return a device's multiprocessors, and whether a kernel may be launched before the one it waits for has ended."""
    if device.type != "cuda":  # Triton's interpreter
        return 2, False
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), properties.major >= 9  # noqa: PLR2004 - Hopper
