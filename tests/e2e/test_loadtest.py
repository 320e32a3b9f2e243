"""The smoke of the load tests, two minutes: real and simulated engines keep its thresholds, faulty ones don't."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.locust_run import locust
from tests.support.processes import Running
from tests.support.running_gateway import running_gateway
from tests.support.simulated_instance import SimulatedInstance

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Importing it here would replace the blocking calls of this process.
    pytest.mark.skipif(find_spec("locust") is None, reason="the loadtest extra is not installed"),
]


@asynccontextmanager
async def simulated_fleet(folder: Path, model: Path, *options: str) -> AsyncIterator[str]:
    """Run two simulated engines, processes of their own, and a gateway; yields its URL."""
    with (
        SimulatedInstance.serve(model, folder / "a.log", *options) as a,
        SimulatedInstance.serve(model, folder / "b.log", *options) as b,
    ):
        instances = [{"id": name, "url": each.url} for name, each in (("a", a), ("b", b))]
        async with running_gateway(folder / "state", tokenizer=model, instances=instances) as gateway:
            await gateway.usable(2)
            yield gateway.url


async def test_real_engines_keep_the_thresholds_of_the_smoke(stack: tuple[Running, str], tmp_path: Path) -> None:
    code, said = await locust(tmp_path, stack[1], "--scenario", "smoke", "--html", str(tmp_path / "smoke.html"))
    assert code == 0, said
    assert "all thresholds of scenario smoke hold" in said
    assert (tmp_path / "smoke.html").stat().st_size > 0


async def test_simulated_engines_keep_them(tiny_cache: Path, tmp_path: Path) -> None:
    async with simulated_fleet(tmp_path, tiny_cache / "tiny-llama") as url:
        code, said = await locust(tmp_path, url, "--scenario", "smoke", "--duration", "30")
    assert code == 0, said
    assert "all thresholds of scenario smoke hold" in said


async def test_engines_whose_streams_break_off_do_not(tiny_cache: Path, tmp_path: Path) -> None:
    async with simulated_fleet(tmp_path, tiny_cache / "tiny-llama", "--die", "0.3") as url:
        code, said = await locust(tmp_path, url, "--scenario", "smoke", "--duration", "20")
    assert code == 1, said
    assert "threshold of scenario smoke broken: failed_ratio is " in said
