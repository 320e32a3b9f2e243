"""Commands of other packages are listed without their code, run when they are called, and missed in one clear line."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvgate.extensions import GROUP
from tests.support.command import typed

ROOT = Path(__file__).parents[3]
COPYING = [".dockerignore", *sorted(path.name for path in (ROOT / "deploy").glob("*.Dockerfile"))]
LAB = ["bench", "conformance", "plan", "replay", "simulate"]


def installed(folder: Path, target: str) -> None:
    """Install a package ``other`` into a folder whose only command is ``other``."""
    metadata = folder / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nother = {target}\n")


def test_the_installation_offers_every_command_of_the_lab() -> None:
    assert {each.name for each in importlib.metadata.entry_points(group=GROUP)} >= set(LAB), "reinstall: make setup"


def test_the_help_lists_the_labs_commands_and_imports_none_of_them() -> None:
    code = (
        "import atexit, sys; from kvgate.__main__ import main; "
        "atexit.register(lambda: print(*sorted(name for name in sys.modules if name.startswith('lab')))); "
        "sys.argv = ['kvgate', '--help']; main()"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    ).stdout
    for name in LAB:
        assert f" {name} " in listed
    assert listed.splitlines()[-1] == "lab lab.commands"


@pytest.mark.parametrize("name", LAB)
def test_the_list_describes_a_command_as_its_own_help_does(name: str) -> None:
    described = importlib.metadata.entry_points(group=GROUP)[name].load().__doc__
    assert described in " ".join(typed(name, "--help", LC_ALL="C", COLUMNS="400").out.split())


def test_a_command_of_another_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "a_package_beside_kvgate:other")
    (tmp_path / "a_package_beside_kvgate.py").write_text(
        'def greet(name: str) -> None:\n    print("hello", name)\n\ndef other():\n    """Greet."""\n    return greet\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "Greet." in typed("--help").out
    assert typed("other", "you") == (0, "hello you\n", "")


def test_a_command_that_can_not_be_imported_is_listed_as_such_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "no_such_package:other")
    monkeypatch.syspath_prepend(tmp_path)
    assert "Not available: No module named 'no_such_package'" in typed("--help").out
    answer = typed("other")
    assert answer.code == 1
    assert answer.err.startswith("kvgate: kvgate other cannot be loaded: No module named 'no_such_package'\n")


def test_an_installation_without_the_group_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgate.extensions.entry_points", lambda **_: importlib.metadata.EntryPoints())
    answer = typed("bench", "pool")
    assert answer.code == 1
    assert "unknown command 'bench'; no command of the entry-point group kvgate.commands is installed" in answer.err
    assert "reinstall kvgate" in answer.err
    assert typed("doctor", "--help").code == 0


def test_a_slip_of_the_pen_is_answered_with_the_command_that_was_meant() -> None:
    answer = typed("simulat")
    assert answer.code == 2
    assert "Did you mean 'simulate'" in answer.err


@pytest.mark.parametrize(
    "file", [".dockerignore", *sorted(path.name for path in (ROOT / "deploy").glob("*.Dockerfile"))]
)
def test_the_wheel_and_images_have_every_package_that_a_command_needs(file: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    targets = [*project["project"]["scripts"].values(), *project["project"]["entry-points"][GROUP].values()]
    assert {target.split(".")[0] for target in targets} <= set(packages)
    lines = (ROOT / ("" if file == ".dockerignore" else "deploy") / file).read_text().splitlines()
    for package in packages:
        assert (f"!{package}" if file == ".dockerignore" else f"COPY {package} {package}") in lines
