"""Which decode batches have a CUDA graph of their own size."""

from collections.abc import Iterator

import pytest

from engines.lmdeploy import graphs
from engines.lmdeploy.hooks import host_hooks
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
