"""LMDeploy still has every symbol that kvgate's hooks replace, with the signature that they were written for."""

import json

import pytest

from engines.lmdeploy.cpu.resources import CpuResources
from tests.support.hook_tables import all_hooks
from tests.support.own_process import ran

TARGETS = [hook.target for hook in all_hooks(CpuResources(threads=1))]

# In a process of its own: other tests of this run install the hooks.
_CHECK = """
import json
from engines.lmdeploy.cpu.resources import CpuResources
from tests.support.hook_tables import all_hooks
from engines.lmdeploy.patching import problem_of
print(json.dumps({hook.target: problem_of(hook) for hook in all_hooks(CpuResources(threads=1))}))
"""


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads(ran(_CHECK).splitlines()[-1])
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_the_hooked_symbol_is_where_and_what_it_was(target: str, problems: dict[str, str | None]) -> None:
    assert problems[target] is None
