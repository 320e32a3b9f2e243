"""Which attention a layer computes with, where there is no card: the rules, and LMDeploy's kernel as what remains."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.lmdeploy.attention import flash3, paged, piecewise
from engines.lmdeploy.attention.overlapped import overlapped
from engines.lmdeploy.attention.paged import PagedAttention

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 64


def inputs(**more: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    pool = torch.zeros((4, 2, PAGE, KV_HEADS, DIM), dtype=torch.bfloat16)
    query = torch.zeros((3, HEADS, DIM), dtype=torch.bfloat16)
    options = {"cache_seqlens": torch.ones(3, dtype=torch.int32), "page_table": torch.zeros((3, 4)), **more}
    return (query, pool[:, 0], pool[:, 1]), options


def test_one_token_a_sequence_over_plain_pages_is_ours() -> None:
    tensors, options = inputs(window_size=(-1, -1), softcap=-1, quant_policy=0, sinks=None, alibi_slopes=None)
    assert paged._serves(*tensors, options)


@pytest.mark.parametrize(("policy", "stored"), [(16, torch.float8_e4m3fn), (17, torch.float8_e5m2)])
def test_pages_in_fp8_with_one_scale_are_ours_and_their_scales_go_along(policy: int, stored: torch.dtype) -> None:
    scales = torch.ones(()), torch.ones(())
    (query, k, v), options = inputs(quant_policy=policy, k_scales_zeros=scales[0], v_scales_zeros=scales[1])
    k, v = k.to(stored), v.clone().to(stored)
    assert paged._serves(query, k, v, options)
    assert paged._fp8_scales(options) == scales
    stored_so = {"quant_policy": policy, "k_scales_zeros": scales[0], "v_scales_zeros": scales[1]}
    assert paged._quantisation(options) == stored_so, "the comparison is over KV of the same form"
    assert not paged._serves(query, k.to(query.dtype), v.to(query.dtype), options)
    assert not paged._serves(query, k, v, {**options, "k_scales_zeros": torch.ones(3)})
    assert not paged._serves(query, k, v, {**options, "quant_policy": 0})


@pytest.mark.parametrize(
    "other",
    [
        {"window_size": (4096, 4096)},
        {"window_size": 128},
        {"softcap": 30.0},
        {"quant_policy": 8},
        {"sinks": torch.ones(HEADS)},
        {"alibi_slopes": torch.ones(HEADS)},
        {"cache_seqlens": torch.ones(1, dtype=torch.int32)},  # three tokens of one sequence
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_our_kernel_lacks_is_lmdeploys(other: dict[str, Any]) -> None:
    tensors, options = inputs(**other)
    assert not paged._serves(*tensors, options)


@pytest.mark.parametrize(
    ("page", "dim", "dtype"), [(256, 64, torch.bfloat16), (64, 96, torch.bfloat16), (64, 64, torch.float32)]
)
def test_shapes_that_the_kernel_cant_tile_are_lmdeploys(page: int, dim: int, dtype: torch.dtype) -> None:
    pool = torch.zeros((4, 2, page, KV_HEADS, dim), dtype=dtype)
    _, options = inputs()
    assert not paged._serves(torch.zeros((3, HEADS, dim), dtype=dtype), pool[:, 0], pool[:, 1], options)


def test_keys_that_are_also_the_values_are_lmdeploys() -> None:
    (query, k, _), options = inputs()
    assert not paged._serves(query, k, k, options)


def test_a_kernel_that_cant_run_here_is_left_out_with_its_reason_and_lmdeploys_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = torch.full((3, HEADS, DIM), 7.0)
    asked = []

    def stock(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append((tensors, options))
        return answer

    verdicts: dict[tuple[Any, ...], str | None] = {}
    layers = [PagedAttention(stock, verdicts) for _ in range(2)]
    tensors, options = inputs()
    with caplog.at_level("WARNING", logger="lmdeploy.kvgate"):
        assert all(layer(*tensors, **options) is answer for layer in layers)
    assert len(verdicts) == 1  # compared once for all layers of one shape
    assert "LMDeploy's own kernel; kvgate's is left out because it failed" in caplog.text
    assert len(caplog.records) == 1


class Flash:
    """What LMDeploy's FA3 implementation has of what is hooked; records how it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def flash_attn_varlen_func_v3(self, **options: Any) -> None:
        self.asked.append(options)


@pytest.mark.parametrize(("tokens", "splits"), [(1, 0), (256, 0), (257, 1), (8192, 1)])
def test_the_history_of_short_prompts_alone_is_split(tokens: int, splits: int) -> None:
    layer = Flash()
    flash3.split_short_prompts(layer)
    layer.flash_attn_varlen_func_v3(q=1, max_seqlen_q=tokens, max_seqlen_k=9)
    asked = {"q": 1, "max_seqlen_q": tokens, "max_seqlen_k": 9, "num_splits": splits}
    assert layer.asked == [asked | {"sm_margin": 0}]
    with overlapped(lambda: None, 24):
        layer.flash_attn_varlen_func_v3(q=1, max_seqlen_q=tokens, max_seqlen_k=9)
    assert layer.asked[1] == asked | {"sm_margin": 24}


@pytest.mark.parametrize(
    ("window", "dtype", "kernel"),
    [
        (None, torch.bfloat16, "flash"),
        ((-1, -1), torch.bfloat16, "flash"),
        (None, torch.float16, "triton"),
        ((4096, 4096), torch.bfloat16, "triton"),
        (4096, torch.bfloat16, "triton"),
    ],
)
def test_the_packaged_flash_attention_computes_bfloat16_without_windows_and_triton_the_rest(
    monkeypatch: pytest.MonkeyPatch, window: Any, dtype: torch.dtype, kernel: str
) -> None:
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl

    monkeypatch.setattr(TritonAttentionImpl, "_forward_prefill", lambda _self, _query: "triton")
    layer = SimpleNamespace(_forward_prefill=lambda _query: "flash")
    flash3.keep_to_what_it_can(layer, SimpleNamespace(sliding_window=window))
    assert layer._forward_prefill(torch.zeros(1, dtype=dtype)) == kernel


def test_a_flash_attention_that_fails_at_its_first_call_leaves_prompts_to_lmdeploys_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lmdeploy.pytorch.backends.cuda.attention.default import TritonAttentionImpl

    monkeypatch.setattr(TritonAttentionImpl, "_forward_prefill", lambda _self, _query: "triton")
    calls = []

    def broken(query: object) -> str:
        calls.append(query)
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    first_call = flash3.FirstCall()
    layers = [SimpleNamespace(_forward_prefill=broken) for _ in range(2)]
    for layer in layers:
        first_call.watch(layer)
    with caplog.at_level("WARNING", logger="lmdeploy.kvgate"):
        assert [layer._forward_prefill(1) for layer in layers * 2] == ["triton"] * 4
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        (
            "attention of prompts: LMDeploy's Triton kernel; FlashAttention-3: RuntimeError: CUDA error: no kernel "
            "image is available for execution on the device"
        )
    ]


def test_a_flash_attention_that_worked_once_raises_what_it_raises_later() -> None:
    answers = iter(["flash"])

    def once(_query: object) -> str:
        return next(answers)

    layer = SimpleNamespace(_forward_prefill=once)
    flash3.FirstCall().watch(layer)
    assert layer._forward_prefill(1) == "flash"
    with pytest.raises(StopIteration):
        layer._forward_prefill(1)


def test_speculation_needs_a_flash_attention_that_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []
    require = flash3.require_for_speculation(lambda: allowed.append(True))
    require()
    assert allowed == [True]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(__name__="fa3_fwd_interface"))
    with pytest.raises(RuntimeError, match="fa3-fwd is built without pages"):
        require()
    assert allowed == [True]


class Prompts:
    """A manager of LMDeploy's graphs of prompts whose captures and replays fail as they are told."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.fails: Exception | None = None

    def get_piecewise_graph_descriptor(self, _context: object, kwargs: dict[str, torch.Tensor]) -> int:
        return kwargs["input_ids"].size(1)

    def prepare(self, descriptor: int, _kwargs: object) -> str:
        if self.fails is not None:
            raise self.fails
        self.captured.append(descriptor)
        return "captured"

    def replay(self, _descriptor: int, _kwargs: object) -> str:
        if self.fails is not None:
            raise self.fails
        return "replayed"


def prompt_graphs() -> tuple[Prompts, piecewise.PromptGraphs]:
    model = torch.nn.Identity()
    model.make_output_buffers = lambda output: {"hidden_states": output}
    model.forward = lambda input_ids: input_ids + 1
    manager = Prompts()
    return manager, piecewise.PromptGraphs(manager, model)


def step(tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros((1, tokens), dtype=torch.long)}


def test_prompts_whose_graph_cant_be_captured_run_eagerly_and_no_other_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, graphs = prompt_graphs()
    assert graphs.prepare(512, step(512)) == "captured"
    manager.fails = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
    with caplog.at_level("WARNING", logger="lmdeploy.kvgate"):
        for tokens in (1024, 1536):
            output = graphs.prepare(tokens, step(tokens))
            assert torch.equal(output["hidden_states"], torch.ones((1, tokens), dtype=torch.long))
    assert manager.captured == [512]
    assert [record.getMessage() for record in caplog.records] == [
        (
            "no CUDA graphs for prompts of 1024 tokens (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 "
            "GiB): they run eagerly"
        )
    ]


def test_a_prompt_that_its_graph_does_not_fit_runs_eagerly_from_then_on() -> None:
    from lmdeploy.pytorch.backends.cuda.graph_runner.piecewise import PiecewiseGraphGuardError

    manager, graphs = prompt_graphs()
    assert graphs.replay(512, step(512)) == "replayed"
    manager.fails = PiecewiseGraphGuardError("the inputs moved")
    assert graphs.get_piecewise_graph_descriptor(None, step(512)) == 512
    assert torch.equal(graphs.replay(512, step(512))["hidden_states"], torch.ones((1, 512), dtype=torch.long))
    assert graphs.get_piecewise_graph_descriptor(None, step(512)) is None


def test_a_model_that_graphs_of_prompts_cant_be_made_for_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise TypeError("forward() got an unexpected keyword argument 'position_ids'")

    make = piecewise.make_piecewise_graph_manager(fails)
    with caplog.at_level("WARNING", logger="lmdeploy.kvgate"):
        assert make(torch.nn.Identity(), None, None, None) is None
    assert "no CUDA graphs for prompts of Identity (TypeError: forward() got" in caplog.text


@pytest.mark.parametrize(("name", "marked"), [("Qwen2ForCausalLM", True), ("GemmaForCausalLM", False)])
def test_models_with_the_conventional_forward_get_graphs_for_short_prompts(name: str, *, marked: bool) -> None:
    from lmdeploy.pytorch.models.utils.cudagraph import CudaGraphMixin, PiecewiseCudaGraphMixin

    kind = type(name, (torch.nn.Module, CudaGraphMixin), {})
    model = kind()
    make = piecewise.make_piecewise_graph_manager(
        lambda model, *_: model if isinstance(model, PiecewiseCudaGraphMixin) else None
    )
    assert (make(model, None, None, None) is not None) is marked
    assert isinstance(model, kind)
    assert type(model).__name__ == name
