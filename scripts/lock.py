"""Resolve ``requirements/cpu.txt`` from pyproject.toml, or check that it was resolved from the present one.

The check compares a digest of the dependency tables, kept in the file's head: no network, no resolver, and the same
answer everywhere. The set is for machines without a GPU; pyproject.toml's overrides leave out what only CUDA needs.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from install import delivers_cpu_build, needs_cpu_index, pinned, pip_settings, uv_settings

ROOT = Path(__file__).resolve().parent.parent
MARK = "# pyproject.toml: "
CPU_BUILD = "+cpu"


def main() -> int:
    """Write or check the file; return the process's exit code."""
    pins = ROOT / "requirements" / "cpu.txt"
    digest = inputs_digest(tomllib.loads((ROOT / "pyproject.toml").read_text()))
    if sys.argv[1:] == ["--check"]:
        if recorded_digest(pins.read_text()) != digest:
            print(f"{pins.relative_to(ROOT)} was resolved from another pyproject.toml: run make lock", file=sys.stderr)
            return 1
        return 0
    pins.write_text(with_digest(resolve(ROOT, pins.read_text()), digest))
    return 0


def inputs_digest(pyproject: dict[str, dict[str, object]]) -> str:
    """Return a digest of the tables that a resolution depends on."""
    project, tool = pyproject["project"], pyproject["tool"]
    uv = tool["uv"]
    tables = [project["requires-python"], project["dependencies"], project["optional-dependencies"], uv]
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


def recorded_digest(pins: str) -> str | None:
    """Return the digest that a pinned set carries, None when it has none."""
    for line in pins.splitlines():
        if line.startswith(MARK):
            return line.removeprefix(MARK)
    return None


def with_digest(pins: str, digest: str) -> str:
    """Return a pinned set with its digest below uv's two lines."""
    first, second, *rest = pins.splitlines()
    return "\n".join([first, second, MARK + digest, *rest]) + "\n"


def resolve(root: Path, present: str) -> str:
    """Run uv's resolver; what the present set pins stays as it is where it still fits.

    torch is resolved in its CPU build (the other one brings 40 packages of CUDA) and pinned without the build's name,
    as each installation finds a CPU build in its own way.
    """
    python = Path(sys.executable)
    torch = pinned(root / "requirements" / "cpu.txt", "torch")
    own_cpu_build = needs_cpu_index() and delivers_cpu_build(python, torch)
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "cpu.txt"
        output.write_text(present.replace(torch, f"{torch}{CPU_BUILD}") if own_cpu_build else present)
        command: list[str | Path] = [
            python.with_name("uv"),
            "pip",
            "compile",
            "--quiet",
            "--all-extras",
            "--python-version",
            "3.11",
        ]
        if not own_cpu_build:
            command.append("--torch-backend=cpu")
        subprocess.run(
            [*command, "--no-emit-index-url", "--no-emit-find-links", "--output-file", output, "pyproject.toml"],
            cwd=root,
            env={**os.environ, **uv_settings(pip_settings(python)), "UV_CUSTOM_COMPILE_COMMAND": "make lock"},
            check=True,
        )
        return output.read_text().replace(CPU_BUILD, "")


if __name__ == "__main__":
    sys.exit(main())
