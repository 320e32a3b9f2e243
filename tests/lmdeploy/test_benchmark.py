"""The decode benchmark measures a real instance and says what is wrong with one that isn't there."""

import json
from pathlib import Path

import pytest

from lab.bench.engine.decode import main
from tests.support.instance import Instance, free_port

pytestmark = pytest.mark.engine


def test_it_prints_one_object_with_units_in_the_names(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        assert main([instance.url, "--model", "m", "--tokens", "8", "--runs", "2", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["bench"] == "decode"
        assert report["metrics"]["decode_best_tokens_per_s"] >= report["metrics"]["decode_median_tokens_per_s"] > 0
        assert report["metrics"]["first_token_median_s"] > 0
        assert main([instance.url, "--model", "other"]) == 1
        assert ": 404" in capsys.readouterr().err


def test_an_instance_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"http://127.0.0.1:{free_port()}", "--model", "m"]) == 1
    assert "no connection" in capsys.readouterr().err
