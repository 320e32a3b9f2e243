from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pd_pair import Pair, pair_of


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two instances whose chunks are short, so that a long prompt is prefilled in several."""
    logs = tmp_path_factory.mktemp("pd")
    with pair_of(
        tiny_llama,
        logs,
        "--session-len",
        "4096",
        "--max-prefill-token-num",
        "512",
        settings={"KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "60"},
    ) as pair:
        yield pair
