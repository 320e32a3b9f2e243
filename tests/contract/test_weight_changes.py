"""Every way that LMDeploy has to change an engine's weights is hooked: a pause, and no block is left."""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engines.lmdeploy.hooks import interruption_hooks
from engines.lmdeploy.hooks.names import ENGINE
from engines.lmdeploy.http.server_sleep import OPERATIONS
from tests.support.own_process import ran

CHANGES = {"update_params", "update_weights_from_ipc", "update_weights_from_distributed", "sleep", "wakeup"}
HARMLESS = {
    "complete_weights_update",  # notes that the weights are awake
    "init_weights_update_group",
    "destroy_weights_update_group",
    "get_checkpoint_engine_status",
    "start",
    "close",
    "release",
}
"""Methods of the executor that an engine calls and that load nothing, or at its start and end alone."""
_LOADS = re.compile(
    r"\.load_weights\(|\bprocess_weights_after_loading\(|\badd_adapters\(|\.load_lora_weights\(|\bbuild_patched_model\(|\.to\(device=device"
)

# In a process of its own: other tests of this run install the hooks.
_LIST = """
import inspect, json
from lmdeploy.pytorch.engine.engine import Engine
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
from lmdeploy.pytorch.engine.mp_engine.base_worker import EngineWorkerBase

def sources(owner):
    return {name: inspect.getsource(f) for name, f in vars(owner).items() if inspect.isfunction(f)}

print(json.dumps({each.__name__: sources(each) for each in (Engine, BaseModelAgent, EngineWorkerBase)}))
"""


@pytest.fixture(scope="module")
def sources() -> dict[str, dict[str, str]]:
    """The methods of LMDeploy's classes with their texts."""
    found: dict[str, dict[str, str]] = json.loads(ran(_LIST).splitlines()[-1])
    return found


def loaders(methods: dict[str, str]) -> set[str]:
    """The methods that load weights themselves or call one that does."""
    found = {name for name, text in methods.items() if _LOADS.search(text)}
    while more := {
        name
        for name, text in methods.items()
        if name not in found and any(re.search(rf"self\.{each}\(", text) for each in found)
    }:
        found |= more
    return found


def test_the_methods_of_a_model_agent_that_change_weights_are_known(sources: dict[str, dict[str, str]]) -> None:
    public = {name for name in loaders(sources["BaseModelAgent"]) if not name.startswith("_")}
    assert public == CHANGES | {"build_model"}


def test_every_method_of_an_engine_that_reaches_one_of_them_is_hooked(sources: dict[str, dict[str, str]]) -> None:
    changing = re.compile(rf"self\.executor\.({'|'.join([*CHANGES, 'build_model'])})\b")
    reaching = {name for name, text in sources["Engine"].items() if changing.search(text)}
    assert reaching == CHANGES
    hooked = {hook.target for hook in interruption_hooks()}
    assert {f"{ENGINE}.{name}" for name in reaching} <= hooked


def test_an_engine_calls_nothing_else_of_its_executor_that_sounds_like_weights(
    sources: dict[str, dict[str, str]],
) -> None:
    called = {name for text in sources["Engine"].values() for name in re.findall(r"self\.executor\.(\w+)", text)}
    like = {name for name in called if re.search(r"weight|param|adapter|lora|load|sleep|wake", name)}
    assert like <= CHANGES | HARMLESS


def test_what_the_server_calls_goes_to_the_engines_method_of_the_same_name(sources: dict[str, dict[str, str]]) -> None:
    for name in CHANGES:
        assert f"self.engine.{name}(" in sources["EngineWorkerBase"][name]


def test_the_routes_that_change_weights_wait_for_each_other() -> None:
    from fastapi import APIRouter
    from lmdeploy.serve.openai.endpoints import management

    router = APIRouter()
    management.register(router, None)
    routes: dict[str, Callable[..., Any]] = {
        route.path: route.endpoint for route in router.routes if "POST" in getattr(route, "methods", ())
    }
    changing = re.compile(rf"\.({'|'.join(CHANGES)})\(")
    found = {path for path, endpoint in routes.items() if changing.search(inspect.getsource(endpoint))}
    assert found == OPERATIONS
