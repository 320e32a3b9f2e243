"""The benchmark of publishing loaded blocks measures all its ways."""

import json

import pytest

from lab.bench.engine import publish


def test_every_way_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert publish.main(["--blocks", "70", "--rounds", "1"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics.keys() == {f"{way}_us" for way in (*publish.WAYS, "ahead_making")}
    assert all(0 < each < 1e6 for each in metrics.values())


def test_no_blocks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        publish.main(["--blocks", "0"])
    assert "at least 1" in capsys.readouterr().err
