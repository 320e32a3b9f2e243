"""Decode attention in equal pieces on a CUDA device, beside LMDeploy's kernel and beside float64."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, BLOCKS = 64, 600
SHAPES = [(28, 4, 128), (32, 8, 128), (8, 8, 64), (16, 1, 256)]
LENGTHS = [
    [1],
    [64],
    [65, 1],
    [20_000, 3, 700],
    [0, 130, 0, 5_000],
    [1 + 37 * number % 3_000 for number in range(16, 10_000, 620)],
]


class Case:
    """Random KV in a pool as LMDeploy lays it out, K beside V, and one query token a sequence."""

    def __init__(self, shape: tuple[int, int, int], lengths: list[int], stored: torch.dtype = torch.bfloat16) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.lengths = lengths
        pool = torch.randn((BLOCKS, 2, PAGE, self.kv_heads, self.dim), device="cuda").to(stored)
        self.fp8_scales = None
        if stored.itemsize == 1:
            self.fp8_scales = torch.tensor(1.5, device="cuda"), torch.tensor(0.5, device="cuda")
        self.k, self.v = pool[:, 0], pool[:, 1]
        pages = max(lengths) // PAGE + 2
        self.table = torch.randint(0, BLOCKS, (len(lengths), pages), device="cuda", dtype=torch.int32)
        self.seqlens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.q = torch.randn((len(lengths), self.heads, self.dim), device="cuda").to(torch.bfloat16)
        self.scale = self.dim**-0.5

    def expected(self) -> torch.Tensor:
        rows = []
        for row, length in enumerate(self.lengths):
            pages = self.table[row, : -(-length // PAGE)].long()
            k = self.k.float()[pages].reshape(-1, self.kv_heads, self.dim)[:length].double()
            v = self.v.float()[pages].reshape(-1, self.kv_heads, self.dim)[:length].double()
            if self.fp8_scales is not None:
                k, v = k * self.fp8_scales[0], v * self.fp8_scales[1]
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
            scores = torch.einsum("hd,lhd->hl", self.q[row].double(), k) * self.scale
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
        return torch.stack(rows)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_sequence_gets_its_attention_whatever_the_lengths_beside_it(
    shape: tuple[int, int, int], lengths: list[int], stored: torch.dtype
) -> None:
    from engines.lmdeploy.attention.decode import attend

    case = Case(shape, lengths, stored)
    expected = case.expected()
    got = attend(case.q, case.k, case.v, case.seqlens, case.table, case.scale, case.fp8_scales).double()
    assert not got.isnan().any()
    assert (got - expected).norm() <= 0.005 * expected.norm()


def test_a_captured_graph_serves_other_lengths() -> None:
    from engines.lmdeploy.attention.decode import attend

    case = Case((28, 4, 128), [9_000, 20, 3_000, 700])
    attend(case.q, case.k, case.v, case.seqlens, case.table, case.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case.q, case.k, case.v, case.seqlens, case.table, case.scale)
    for lengths in ([1, 1, 1, 1], [5, 9_000, 0, 64], [9_000, 20, 3_000, 700]):
        case.lengths = lengths
        case.seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        expected = case.expected()
        assert (out.double() - expected).norm() <= 0.005 * expected.norm()


@pytest.mark.parametrize("policy", [0, 16, 17])
def test_the_layer_computes_with_our_kernel_after_it_was_compared_with_lmdeploys(policy: int) -> None:
    from lmdeploy.messages import QuantPolicy
    from lmdeploy.pytorch.kernels.cuda import flash_attn_with_kvcache

    from engines.lmdeploy.attention.paged import PagedAttention

    calls = []

    def stock(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(options)
        return flash_attn_with_kvcache(*arguments, **options)

    verdicts: dict[tuple[object, ...], str | None] = {}
    layer = PagedAttention(stock, verdicts)
    stored = {0: torch.bfloat16, 16: torch.float8_e4m3fn, 17: torch.float8_e5m2}[policy]
    case = Case((28, 4, 128), [5_000, 64, 1], stored)
    scales = (None, None) if case.fp8_scales is None else case.fp8_scales
    starts = torch.arange(4, device="cuda", dtype=torch.int32)
    for _ in range(3):
        out = layer(
            case.q,
            case.k,
            case.v,
            cache_seqlens=case.seqlens,
            page_table=case.table,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            softmax_scale=case.scale,
            quant_policy=QuantPolicy(policy),
            k_scales_zeros=scales[0],
            v_scales_zeros=scales[1],
        )
    assert list(verdicts.values()) == [None]
    assert len(calls) == 1  # the comparison
    expected = case.expected()
    assert (out.double() - expected).norm() <= 0.005 * expected.norm()
