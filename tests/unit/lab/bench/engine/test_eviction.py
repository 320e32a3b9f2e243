"""Both evictions free what they are asked for, again and again, and both are timed."""

import json

import pytest

from lab.bench.engine.eviction import main, run


def test_both_evictions_free_what_is_wanted_and_are_timed() -> None:
    metrics = run(leaves=50, victims=7, rounds=12)
    assert {"lmdeploy_evict_7_of_50_p50_ms", "policy_evict_7_of_50_p50_ms"} <= metrics.keys()
    assert all(value > 0 for value in metrics.values())


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--leaves", "20", "--victims", "5", "--rounds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"] == "eviction"


def test_more_victims_than_leaves_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--leaves", "5", "--victims", "6"])
    assert "--victims must be between 1 and --leaves" in capsys.readouterr().err
