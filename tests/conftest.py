"""What holds for every test."""

from typing import Any, Final

import pytest
from hypothesis import settings

from tests.support.examples import FULL, QUICK

ONE_STACK: Final = {"tests/e2e/test_openai_sdk.py", "tests/e2e/test_surface.py"}
"""Files whose tests ask one started stack: one process has them all."""

# A busy machine makes any example slow once in a while: what is tested is what comes out, never how soon.
settings.register_profile(FULL, deadline=None)
settings.register_profile(QUICK, deadline=None, max_examples=25)
settings.load_profile(QUICK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let processes share the tests a file at a time, as ``--dist loadfile`` does, but for what shares a stack."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "one stack" if file in ONE_STACK else file

    return ByFile(config, log)
