"""LMDeploy still has every symbol that kvgate's hooks replace, with the signature that they were written for."""

import json

import pytest

from engines.lmdeploy.cpu.resources import CpuResources
from tests.support.hook_tables import all_hooks
from tests.support.own_process import ran

Found = dict[str, tuple[str | None, list[str]]]
TARGETS = [hook.target for hook in all_hooks(CpuResources(threads=1))]

# In a process of its own: other tests of this run install the hooks.
_CHECK = """
import json
from engines.lmdeploy.cpu.resources import CpuResources
from tests.support.hook_tables import all_hooks, arguments_not_taken
from engines.lmdeploy.patching import problem_of
hooks = all_hooks(CpuResources(threads=1))
print(json.dumps({hook.target: (problem_of(hook), arguments_not_taken(hook)) for hook in hooks}))
"""


@pytest.fixture(scope="module")
def problems() -> Found:
    found: Found = json.loads(ran(_CHECK).splitlines()[-1])
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_the_hooked_symbol_is_where_and_what_it_was(target: str, problems: Found) -> None:
    assert problems[target][0] is None


@pytest.mark.parametrize("target", TARGETS)
def test_its_replacement_takes_each_argument_by_its_name(target: str, problems: Found) -> None:
    assert problems[target][1] == []
