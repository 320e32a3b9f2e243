import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import lock as module

    return module


def test_the_pinned_set_was_resolved_from_the_present_pyproject() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "lock.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_another_dependency_is_another_digest(lock: ModuleType) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    before = lock.inputs_digest(pyproject)
    pyproject["project"]["dependencies"].append("left-pad")
    assert lock.inputs_digest(pyproject) != before


def test_the_digest_is_found_again(lock: ModuleType) -> None:
    pins = lock.with_digest("# by uv\n#    make lock\na==1\n", "abc")
    assert lock.recorded_digest(pins) == "abc"
    assert lock.recorded_digest("a==1\n") is None


def test_the_pinned_set_names_no_host() -> None:
    assert "://" not in (ROOT / "requirements" / "cpu.txt").read_text()
