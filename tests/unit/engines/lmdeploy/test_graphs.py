"""Which decode batches have a CUDA graph of their own size."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.lmdeploy import graphs
from engines.lmdeploy.hooks import attention_hooks, host_hooks
from engines.lmdeploy.patching import install

_TARGET = "lmdeploy.pytorch.config:normalize_cudagraph_capture_batch_sizes"


@pytest.fixture
def hooked() -> Iterator[None]:
    undo = install([hook for hook in host_hooks() if hook.target == _TARGET])
    yield
    undo()


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (6, [1, 2, 4, 6]),
        (16, [1, 2, 4, 6, 8, 16]),
        (100, [1, 2, 4, 6, 8, 16, 32, 64, 100]),
        (1000, [1, 2, 4, 6, 8, 16, 32, 64, 128, 256, 512, 768, 1000]),
    ],
)
def test_small_batches_are_captured_at_their_size_and_the_largest_always(most: int, sizes: list[int]) -> None:
    assert graphs.capture_sizes(most) == sizes


@pytest.mark.usefixtures("hooked")
def test_every_engine_captures_them_unless_its_command_line_names_others() -> None:
    from lmdeploy.pytorch.config import CacheConfig

    def of(sizes: list[int] | None) -> list[int] | None:
        config = CacheConfig(
            max_batches=12,
            block_size=64,
            num_cpu_blocks=0,
            num_gpu_blocks=16,
            cudagraph_capture_batch_sizes=sizes,
        )
        found: list[int] | None = config.cudagraph_capture_batch_sizes
        return found

    assert of(None) == [1, 2, 4, 6, 8, 12]
    assert of([3, 5]) == [3, 5, 12]


@pytest.mark.usefixtures("hooked")
def test_the_graph_runner_asks_for_the_same_sizes() -> None:
    from lmdeploy.pytorch.backends import graph_runner

    assert graph_runner.normalize_cudagraph_capture_batch_sizes(None, 6) == [1, 2, 4, 6]


def test_the_log_names_sizes_time_and_memory() -> None:
    assert graphs.report([1, 2, 6], took_s=3.25, used_bytes=5 << 20) == (
        "the warm-up with CUDA graphs for decode batches of 1, 2, 6 took 3.2 s and 5 MiB of GPU memory"
    )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """LMDeploy's own graph runner, whose captures bind the step's metadata and fail; ``captures`` lists them."""
    from lmdeploy.pytorch.backends.cuda.graph_runner import runner as module

    captures: list[int] = []

    class Capture:
        def __init__(self, model: Any, *, max_batches: int, **_: object) -> None:
            self._model, self._batches = model, max_batches

        def capture(self, *, attn_metadata: Any, **_: object) -> None:
            captures.append(self._batches)
            attn_metadata.q_seqlens = torch.zeros(self._batches)  # as LMDeploy does
            self._model.ctx_mgr.current_context().q_seqlens = attn_metadata.q_seqlens
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.context = SimpleNamespace(q_seqlens=torch.ones(3))
            self.ctx_mgr = SimpleNamespace(current_context=lambda: self.context)

        def forward(self, attn_metadata: Any, input_ids: torch.Tensor) -> torch.Tensor:
            assert self.context.q_seqlens.numel() == attn_metadata.q_seqlens.numel() == input_ids.numel()
            return input_ids * 2

        def make_output_buffers(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"hidden_states": output}

    monkeypatch.setattr(module, "CUDASingleGraphRunner", Capture)
    undo = install([hook for hook in attention_hooks() if hook.target.endswith("._capture_full_graph")])
    found = object.__new__(module.CUDAGraphRunner)
    found.model = Model()
    found.ctx_mgr = found.model.ctx_mgr
    found.backend_config = SimpleNamespace(device_type="maca")
    found.num_blocks, found.model_config, found.device = 8, None, "cpu"
    found._decode_model_forward = found._full_graph_pool_handle = None
    found._full_graph_runners = {}
    found.cudagraph_strategy = SimpleNamespace(get_max_tokens=lambda size, *_: size)
    found.captures = captures
    yield found
    undo()


def test_decode_steps_whose_graph_cant_be_captured_run_eagerly(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    metadata = SimpleNamespace(q_seqlens=torch.ones(3))
    with caplog.at_level("WARNING", logger="lmdeploy.kvgate"):
        for _ in range(2):
            kwargs = {"attn_metadata": metadata, "input_ids": torch.tensor([[1, 2, 3]])}
            output = runner._capture_full_graph((4, True, False, 1), kwargs)
            assert output["hidden_states"].tolist() == [[2, 4, 6]]
    assert runner.captures == [4]
    assert runner._full_graph_runners == {}
    assert [record.getMessage() for record in caplog.records] == [
        (
            "no CUDA graph for decode batches of 4 (RuntimeError: CUDA error: operation not permitted when stream is "
            "capturing): these steps run eagerly, with a launch for each kernel"
        )
    ]
