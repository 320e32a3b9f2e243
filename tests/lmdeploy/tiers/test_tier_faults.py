"""What fails in the tiers costs hits: never a token, never the engine's loop, never an end to waiting."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tiered_engine import NEW_TOKENS, PROMPTS, TieredEngine, since, visit

pytestmark = pytest.mark.engine


def test_a_load_that_fails_is_computed_instead_and_not_tried_again_for_that_request(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    before = tiered.offload
    faults(engine_write={"fail": 1.0})
    for place in range(3):
        tiered.evict_hbm()
        assert tiered.run(PROMPTS[place], new_tokens=NEW_TOKENS) == [expected[place]]
    assert since(before, tiered, "failed_loads") == 3
    assert since(before, tiered, "loads") == 0
    faults()
    tiered.evict_hbm()
    assert tiered.run(PROMPTS[4], new_tokens=NEW_TOKENS) == [expected[4]]
    assert since(before, tiered, "loads") == 1, "a later request is served from the tiers again"


def test_flaky_transfers_under_concurrency_never_change_a_token(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    faults(engine_write={"fail": 0.3, "delay_s": 0.01}, engine_read={"fail": 0.3, "delay_s": 0.01})
    for _ in range(3):
        assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
    tiered.check()


@pytest.mark.parametrize("name", ["find_run", "survey", "estimate_load_s", "hold", "load", "save", "poll", "wait"])
def test_a_runtime_that_raises_costs_hits_and_nothing_else(
    tiered: TieredEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    before = tiered.offload
    raised = 0

    def broken(*_: object, **__: object) -> Any:
        nonlocal raised
        raised += 1
        if name == "poll" and raised > 20:
            return original()
        raise RuntimeError(f"{name} is broken")

    owner = tiered.hierarchy.claims if name == "hold" else tiered.hierarchy
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        tiered.evict_hbm()
        if name == "save":  # with all blocks below there is nothing to save
            tiered.hierarchy.drop()
        assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
    assert raised
    assert since(before, tiered, "guard_errors") > 0
    assert tiered.run(PROMPTS[0], new_tokens=NEW_TOKENS) == [expected[0]]


@pytest.mark.parametrize("name", ["plan_save", "plan_load", "shorten"])
def test_a_planner_that_raises_costs_hits_and_nothing_else(
    tiered: TieredEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    before = tiered.offload

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError(f"{name} is broken")

    with monkeypatch.context() as patch:
        patch.setattr(tiered.door, name, broken)
        tiered.evict_hbm()
        assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
    assert since(before, tiered, "guard_errors") > 0
    assert tiered.run(PROMPTS[0], new_tokens=NEW_TOKENS) == [expected[0]]


def test_blocks_that_go_between_look_up_and_load_are_computed(
    tiered: TieredEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    hierarchy, hold = tiered.hierarchy, tiered.hierarchy.claims.hold

    def hold_and_lose(block_ids: Any) -> Any:
        held = hold(block_ids)
        hierarchy.drop(block_ids)
        return held

    with monkeypatch.context() as patch:
        patch.setattr(hierarchy.claims, "hold", hold_and_lose)
        tiered.evict_hbm()
        assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
