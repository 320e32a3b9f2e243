"""The command line of a simulated engine refuses what no engine could be, before it opens anything."""

from pathlib import Path

import pytest

from engines.sim.__main__ import main


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--port", "99999", "1 to 65,535"),
        ("--port", "0", "1 to 65,535"),
        ("--hbm-blocks", "99999999999999", "1 to 10,000,000"),
        ("--nvme-blocks", "-1", "0 to 10,000,000"),
        ("--slow", "1e300", "1e-06 to 1,000,000.0"),
        ("--slow", "nan", "1e-06 to 1,000,000.0"),
        ("--capacity-lie", "1e300", "1e-06 to 1,000,000.0"),
        ("--die", "2", "0 to 1"),
        ("--jitter", "inf", "0 to 1"),
        ("--answer-tokens", "0", "1 to 1,073,741,824"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], option: str, value: str, allowed: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", "x", "--port", "9001", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: {value} is not allowed; allowed is {allowed}" in capsys.readouterr().err


def test_a_model_folder_that_can_not_be_used_is_said_with_what_is_needed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def said(folder: Path) -> str:
        assert main(["--model", str(folder), "--port", "9001"]) == 1
        return capsys.readouterr().err

    none = tmp_path / "none"
    assert said(none) == f"{none}: no such folder; pass a model folder with a tokenizer.json\n"
    assert "there is no tokenizer.json in it" in said(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"{tmp_path / 'tokenizer.json'} can't be read, or a file beside it: " in said(tmp_path)
