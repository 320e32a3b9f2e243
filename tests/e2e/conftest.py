from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.models.tiny import build_tiny
from kvgate.host.ports import free_ports
from tests.support.processes import Running, running


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the tiny model, so that no stack waits for its making."""
    cache = tmp_path_factory.mktemp("cache")
    build_tiny(cache / "tiny-llama")
    return cache


@pytest.fixture(scope="session")
def environment(tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What keeps the tests out of the user's folders, and LMDeploy's threads off each other."""
    return {
        "KVGATE_CACHE_DIR": str(tiny_cache),
        "KVGATE_STATE_DIR": str(tmp_path_factory.mktemp("state")),
        "KVGATE_ENGINE_CPU_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


@pytest.fixture(scope="module")
def stack(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """``kvgate up --tiny``, ready, and the gateway's URL; shared by the tests of a file, which leave it as it is.

    Idle engines take a tenth of a core: for the whole session they would cost more than another start.
    """
    port = free_ports(1)[0]
    log = tmp_path_factory.mktemp("stack") / "up.log"
    with running(["up", "--tiny", "--port", str(port)], log, environment, warm=3) as up:
        up.until_said("Ctrl-C stops everything")
        yield up, f"http://127.0.0.1:{port}"
