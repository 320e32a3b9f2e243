import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from engines.lmdeploy.patching import Hook, HookMismatchError, install


class Engine:
    def step(self, tokens: int) -> int:
        return tokens

    @classmethod
    def build(cls, name: str) -> str:
        return name


def policy(blocks: int) -> int:
    return blocks


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the host project: a module, and another that imported from it by name."""
    module, user = ModuleType("lmdeploy_like"), ModuleType("lmdeploy.like_user")
    module.Engine = type("Engine", (), dict(vars(Engine)))
    module.policy = user.imported_policy = policy
    monkeypatch.setitem(sys.modules, "lmdeploy_like", module)
    monkeypatch.setitem(sys.modules, "lmdeploy.like_user", user)
    module.user = user
    return module


def _hook(target: str, signature: str | None, replace: Callable[[Any], Any]) -> Hook:
    return Hook(target=f"lmdeploy_like:{target}", signature=signature, replace=replace, why="a test")


def test_a_method_and_a_function_imported_by_name_are_replaced(host: ModuleType) -> None:
    install(
        [
            _hook("Engine.step", "(self, tokens: int) -> int", lambda old: lambda self, tokens: old(self, tokens) + 1),
            _hook("policy", "(blocks: int) -> int", lambda old: lambda blocks: old(blocks) * 10),
        ]
    )
    assert host.Engine().step(1) == 2
    assert host.policy(1) == host.user.imported_policy(1) == 10


def test_what_was_installed_can_be_taken_out_again(host: ModuleType) -> None:
    undo = install([_hook("policy", "(blocks: int) -> int", lambda _: lambda blocks: -blocks)])
    undo()
    assert host.policy is host.user.imported_policy is policy


def test_one_target_can_be_wrapped_twice_in_order(host: ModuleType) -> None:
    add = _hook("policy", "(blocks: int) -> int", lambda old: lambda blocks: old(blocks) + 1)
    double = _hook("policy", None, lambda old: lambda blocks: old(blocks) * 2)
    install([add, double])
    assert host.policy(3) == host.user.imported_policy(3) == 8


def test_two_names_of_one_function_are_wrapped_once_each_in_order_and_unwrapped(host: ModuleType) -> None:
    host.policy_again = policy
    add = _hook("policy", None, lambda old: lambda blocks: old(blocks) + 1)
    double = _hook("policy_again", None, lambda old: lambda blocks: old(blocks) * 2)
    undo = install([add, double])
    assert (host.policy_again(3), host.user.imported_policy(3)) == (8, 8)
    undo()
    assert host.policy_again is host.user.imported_policy is policy


@pytest.mark.usefixtures("host")
def test_a_module_that_is_loaded_while_hooks_are_installed_gets_the_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_another(old: Any) -> Any:
        late = ModuleType("lmdeploy.like_late")
        late.imported_policy = policy
        monkeypatch.setitem(sys.modules, "lmdeploy.like_late", late)
        return old

    install(
        [
            _hook("policy", None, lambda old: lambda blocks: old(blocks) * 10),
            _hook("Engine.step", None, load_another),
        ]
    )
    assert sys.modules["lmdeploy.like_late"].imported_policy(1) == 10


def test_moved_symbols_are_all_named_and_nothing_is_changed(host: ModuleType) -> None:
    with pytest.raises(HookMismatchError) as failure:
        install(
            [
                _hook("Engine.step", "(self, tokens: int) -> int", lambda _: None),
                _hook("Engine.gone", None, lambda _: None),
                _hook("policy", "(blocks: int, tier: str) -> int", lambda _: None),
                Hook(target="lmdeploy_moved:x", signature=None, replace=lambda _: None, why="a test"),
            ]
        )
    assert len(failure.value.problems) == 3
    for name in ("lmdeploy_like:Engine.gone", "lmdeploy_like:policy", "lmdeploy_moved:x"):
        assert name in str(failure.value)
    assert host.Engine().step(1) == 1
    assert host.policy is policy
