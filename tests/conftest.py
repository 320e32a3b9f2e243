"""What holds for every test."""

import os
from collections.abc import Iterable
from typing import Final

import pytest
from hypothesis import settings

from kvcontrol.core.garbage import freeze_garbage
from kvgate.host.ports import PORT_RANGE_VARIABLE
from tests.support.examples import FULL, QUICK

BEGIN_WITH: Final = (
    "tests/unit/lab/conformance/test_conformance.py",
    "tests/e2e/test_up_life.py",
    "tests/e2e/test_up_tiers.py",
    "tests/integration/gateway/test_workers.py",
)
"""Files that take over a minute and whose place in the order is near the end: one process would be alone with them."""

SPREAD: Final = {"e2e", "integration", "lmdeploy", "unit"}
"""Folders whose files run beside those of the others. Those of ``integration`` wait for most of their time, those of
``lmdeploy`` compute: one folder after the other, the cores would be idle in one and overloaded in the next.
"""

# A busy machine makes any example slow once in a while: what is tested is what comes out, never how soon.
settings.register_profile(FULL, deadline=None)
# The same examples in every run of the suite: what only some draws find is the slow lane's to find.
settings.register_profile(QUICK, deadline=None, max_examples=25, derandomize=True)
settings.load_profile(QUICK)

WORKER_VARIABLE: Final = "PYTEST_XDIST_WORKER"
"""``gw0``, ``gw1``, ...: pytest-xdist's name for the process that runs tests."""
FIRST_PORT, PORTS_EACH, RANGES = 10000, 2500, 8

# A port that a test has chosen and doesn't listen on yet must not be taken by one that runs beside it.
if os.environ.get(WORKER_VARIABLE, "").startswith("gw"):
    first_port = FIRST_PORT + PORTS_EACH * (int(os.environ[WORKER_VARIABLE][2:]) % RANGES)
    os.environ[PORT_RANGE_VARIABLE] = f"{first_port}-{first_port + PORTS_EACH - 1}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests, let them take the files in the order that keeps the cores busy to the end."""
    if WORKER_VARIABLE not in os.environ:
        return
    places = _places(dict.fromkeys(_file_of(item) for item in items))
    items.sort(key=lambda item: places[_file_of(item)])


def pytest_collection_finish() -> None:
    """Leave nine thousand tests and what they import out of every later garbage collection."""
    freeze_garbage()


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _places(files: Iterable[str]) -> dict[str, tuple[bool, bool, float]]:
    """Return the sort key of each test file: first the files of ``BEGIN_WITH``, then the folders outside ``SPREAD`` one
    after the other, then the files of the folders in ``SPREAD``, mixed evenly.
    """
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(file.split("/")[1], []).append(file)
    return {
        file: (file not in BEGIN_WITH, folder in SPREAD, (index + 0.5) / len(inside) if folder in SPREAD else 0.0)
        for folder, inside in folders.items()
        for index, file in enumerate(inside)
    }
