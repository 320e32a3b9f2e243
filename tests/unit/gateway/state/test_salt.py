import stat
from pathlib import Path

import pytest

from gateway.errors import StateError
from gateway.state import load_salt_secret
from gateway.state.salt import FILE_NAME


def test_the_secret_is_made_once_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    secret = load_salt_secret(folder)
    assert len(secret) == 32
    assert load_salt_secret(folder) == secret
    assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    assert [each.name for each in folder.iterdir()] == [FILE_NAME]
    assert load_salt_secret(tmp_path / "other") != secret


@pytest.mark.parametrize("content", ["", "zz", "00ff", "é"])
def test_a_damaged_secret_is_named_and_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(StateError, match=FILE_NAME):
        load_salt_secret(tmp_path)
    assert path.read_text(encoding="utf-8") == content


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_salt_secret(tmp_path)
    (tmp_path / FILE_NAME).chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        load_salt_secret(tmp_path)


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        load_salt_secret(tmp_path / "file" / "state")
