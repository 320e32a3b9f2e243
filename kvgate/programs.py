"""Commands that are programs of their own: ``kvgate`` becomes them before it imports anything."""

import os
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, NoReturn

PROGRAMS: Final = MappingProxyType({"gateway": "gateway", "sim": "engines.sim"})
"""The module that runs, by the command's name. Its own command line has the options."""


def become(name: str, arguments: Sequence[str]) -> NoReturn:
    """Become a program: the same process goes on as ``python -m MODULE ARGUMENTS``."""
    os.execv(sys.executable, (sys.executable, "-m", PROGRAMS[name], *arguments))  # noqa: S606
