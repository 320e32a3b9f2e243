"""locust and a scenario of its own against a gateway that runs here: it passes, and a fault makes it fail by name."""

import asyncio
import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines.models.tiny import write_tokenizer
from tests.support.locust_run import locust
from tests.support.scripted_engine import Script
from tests.support.tokenized_fleet import tokenized_fleet

SCENARIO = """
[load]
users = 2
ramp_s = 0
duration_s = 3

[chat]
share = 1
system_tokens = 64
first_tokens = 32
turn_tokens = 16
answer_tokens = 4
think_s = 0.05

[thresholds]
requests_min = 1
failed_ratio_max = 0.0
shed_ratio_max = 0.0
ttft_p50_ms_max = 1000
"""

# Importing it here would replace the blocking calls of this process.
pytestmark = pytest.mark.skipif(find_spec("locust") is None, reason="the loadtest extra is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("models") / "tiny-llama")


async def own(folder: Path, url: str, *arguments: str, scenario: str = SCENARIO) -> tuple[int, str]:
    """Run a scenario that is written for it."""
    file = folder / "own.toml"
    file.write_text(scenario)
    return await locust(folder, url, "--scenario", str(file), *arguments)


async def test_a_healthy_gateway_passes_and_its_figures_stand_in_locusts_own_files(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path / "state", model) as fleet:
        code, said = await own(
            tmp_path,
            fleet.gateway.url,
            *("--csv", str(tmp_path / "run"), "--html", str(tmp_path / "run.html")),
            scenario=SCENARIO.replace("ttft_p50_ms_max = 1000", "ttft_p50_ms_max = 60000\ncached_ratio_min = 0.1"),
        )
        asked = [each["messages"] for engine in fleet.engines.values() for each in engine.requests]
    assert code == 0, said
    assert "all thresholds of scenario own hold" in said
    with (tmp_path / "run_stats.csv").open(newline="") as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    requests = int(rows["POST", "chat"]["Request Count"])
    assert 1 <= requests <= len(asked)
    assert {"TTFT ms", "ITL ms", "cached tokens", "prompt tokens"} <= {kind for kind, _ in rows}
    assert int(rows["TTFT ms", "chat"]["Request Count"]) == int(rows["", "Aggregated"]["Request Count"]) == requests
    assert "cached tokens" in (tmp_path / "run.html").read_text()
    assert len({messages[0]["content"] for messages in asked}) == 1, "all share the system prompt"


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (Script(ttft_s=1.2), "ttft_p50_ms"),
        (Script(status=500), "failed_ratio is 1; max 0"),
        (Script(status=429), "shed_ratio is 1; max 0"),
    ],
)
async def test_a_fault_fails_the_run_and_names_the_threshold(
    tmp_path: Path, model: Path, fault: Script, broken: str
) -> None:
    async with tokenized_fleet(tmp_path / "state", model, retry_budget_ratio=0.0) as fleet:
        for engine in fleet.engines.values():
            engine.default = fault
        code, said = await own(tmp_path, fleet.gateway.url)
    assert code == 1, said
    assert f"threshold of scenario own broken: {broken}" in said, said


async def test_what_cant_be_tested_is_refused_before_anything_is_asked(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path / "state", model) as fleet:
        url = fleet.gateway.url
        refusals = await asyncio.gather(own(tmp_path, url, "--scale", "1000"), own(tmp_path, url, "--scenario", "none"))
        assert not fleet.requests
    assert {code for code, _ in refusals} == {2}
    long, unknown = (said for _, said in refusals)
    assert "needs a context of" in long
    assert "has 8192: --scale" in long
    assert "unknown scenario 'none'; known: agent, " in unknown
