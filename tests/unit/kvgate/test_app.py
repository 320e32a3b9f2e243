"""The list of commands costs no import of theirs, and a command imports nothing that it does not need."""

import subprocess
import sys

import pytest

from kvgate.commands import COMMANDS
from kvgate.lazy import summary_of
from kvgate.programs import PROGRAMS
from tests.support.command import typed

_IMPORTED = """
import atexit, os, sys
imported = lambda: print("imported", *sorted({name.split(".")[0] for name in sys.modules}), flush=True)
def become(*_):
    imported()
    os._exit(0)
os.execv = become
atexit.register(imported)
from kvgate.__main__ import main
sys.argv = ["kvgate", *sys.argv[1:]]
main()
"""
_ENGINES = {"accelerate", "lmdeploy", "numpy", "pandas", "tokenizers", "torch", "transformers"}
_SERVERS = {"aiohttp", "dns", "fastapi", "starlette", "uvicorn", "zmq"}
_LAB = {"lab", "matplotlib"}


def imported_by(*words: str) -> set[str]:
    """Return the top-level packages that a command has imported when it ends, or becomes another program."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *words], capture_output=True, text=True, check=False, timeout=240
    )
    line = done.stdout.splitlines()[-1].split()
    assert line[0] == "imported", done
    return set(line[1:])


def test_a_command_that_is_a_program_of_its_own_is_begun_with_the_standard_library_alone() -> None:
    for name in PROGRAMS:
        ours = imported_by(name, "--help") - sys.stdlib_module_names
        assert {each for each in ours if not each.startswith(("_", "sitecustomize"))} <= {"kvgate", "coverage"}


def test_the_list_of_commands_imports_none_of_them() -> None:
    assert not imported_by("--help") & (_ENGINES | _SERVERS | {"engines", "gateway", "httpx2", "kvcontrol", "psutil"})


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["up", "--model", "/nonexistent"], {"pydantic_settings", "yaml"}),
        (["engine", "--model", "/nonexistent"], {"gateway", "httpx2", "pydantic_settings", "yaml"}),
        (["doctor", "--hardware", "x"], {"gateway", "httpx2"}),
        (["admin", "--url", "http://127.0.0.1:1", "--admin-key", "k" * 32, "tenants", "list"], {"engines"}),
        (["top", "--once", "--url", "http://127.0.0.1:1", "--admin-key", "k" * 32], {"engines"}),
        (["register", "a", "--engine", "http://127.0.0.1:1", "--url", "x", "--key", "k"], {"engines", "gateway"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_imports_no_server_no_engine_and_nothing_of_the_lab(words: list[str], other: set[str]) -> None:
    found = imported_by(*words)
    assert "kvgate" in found
    assert not found & (_ENGINES | _SERVERS | _LAB | other)


@pytest.mark.parametrize("name", [load.__name__ for _, load, _ in COMMANDS if load.__name__ not in PROGRAMS])
def test_the_list_describes_a_command_as_its_own_help_does(name: str) -> None:
    described = next(summary_of(load) for _, load, _ in COMMANDS if load.__name__ == name)
    assert described.rstrip(".") in " ".join(typed(name, "--help", LC_ALL="C", COLUMNS="400").out.split())
    assert described.split(",")[0].rstrip(".") in " ".join(typed("--help", COLUMNS="400").out.split())
