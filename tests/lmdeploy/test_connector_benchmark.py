"""The benchmark of the connector's own cost runs the script that it says it runs."""

import json

import pytest

from lab.bench.engine import connector

pytestmark = pytest.mark.engine


def test_the_cost_of_each_phase_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert connector.main(["--blocks", "6", "--rounds", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    metrics = printed["metrics"]
    assert printed["blocks"] == 6
    for phase in connector.PHASES:
        assert 0 < metrics[f"{phase}_us"] < 1e6
        assert 0 < metrics[f"{phase}_request_us"] < 1e6
    assert metrics["revisit_allocated_us"] > 0
    assert "hbm_hit_allocated_us" not in metrics, "nothing is loaded for what the engine has"


def test_a_context_without_a_block_to_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        connector.main(["--blocks", "1"])
    assert "at least 2" in capsys.readouterr().err
