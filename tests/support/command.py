"""``kvgate ...`` as a person would type it, run in the test's own process: a start of its own costs seconds."""

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple, TextIO

import pytest

from kvgate.__main__ import main
from kvgate.display import output


class Said(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def _no_other_process(path: str, *_: object) -> None:
    raise AssertionError(f"the test's process would become {path}")


def typed(*words: str, into: TextIO | None = None, **environment: str) -> Said:
    """Run a command with these variables as well; an exception that it lets out is the test's.

    Its standard output is the whole process's: one command at a time, in whatever thread. ``into`` takes it instead.
    """
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(into or out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["kvgate", *words])
        for name in ("execv", "execve"):
            patch.setattr(os, name, _no_other_process)
        variables = {"COLUMNS": "200", "NO_COLOR": "1", **environment}
        for name, value in variables.items():
            patch.setenv(name, value)
        # A console keeps the width that it found when it was made, in whichever test that was.
        patch.setattr(output, "_width", int(variables["COLUMNS"]))
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


__all__ = ["Said", "typed"]
