"""Where API keys of ``kvgate up`` come from."""

from pathlib import Path

import pytest

from kvgate.failure import CommandError
from kvgate.up.api_keys import ApiKey, chosen_keys


def test_api_keys_of_the_environment_are_taken_where_no_option_has_one() -> None:
    fetched = {"KVGATE_API_KEYS": '[{"key": "sk-1", "tenant": "acme"}]'}
    assert ApiKey.from_environment(fetched) == (ApiKey(key="sk-1", tenant="acme", shown=False),)
    assert ApiKey.from_environment({}) == ()
    for bad in ("sk-1", '["sk-1"]', '[{"key": "sk-1"}]', "7"):
        with pytest.raises(CommandError, match="KVGATE_API_KEYS is not a list of keys") as failure:
            ApiKey.from_environment({"KVGATE_API_KEYS": bad})
        assert "sk-1" not in failure.value.message


def private(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    path = private(tmp_path, "# of the team\nacme:sk-1\n\n  sk-2  \n")
    file = (ApiKey(key="sk-1", tenant="acme", shown=False), ApiKey(key="sk-2", tenant="default", shown=False))
    assert ApiKey.from_file(path) == file
    assert chosen_keys(["b:sk-3"], path) == (ApiKey(key="sk-3", tenant="b"), *file)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "contains no key"), ("# none\n", "contains no key"), ("sk-1\n:sk-hush", "line 2"), ("acme:", "line 1")],
)
def test_a_file_without_keys_is_refused_and_none_is_shown(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(CommandError, match=why) as failure:
        ApiKey.from_file(private(tmp_path, text))
    assert "hush" not in failure.value.message


@pytest.mark.parametrize("mode", [0o644, 0o622, 0o606])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path, "sk-1")
    path.chmod(mode)
    with pytest.raises(CommandError, match="readable by other users"):
        ApiKey.from_file(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read"):
        ApiKey.from_file(tmp_path / "absent")


def test_a_key_is_in_no_text_that_python_makes_of_it() -> None:
    assert "hush" not in repr(ApiKey(key="hush", tenant="acme"))
