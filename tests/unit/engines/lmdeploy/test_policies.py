"""What is checked before an engine hears of a change, and what a change leaves alone; no engine."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engines.control.calls import EngineBusyError
from engines.control.errors import RefusedError
from engines.control.operations import SET_POLICY
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.hooks import eviction_hooks
from engines.lmdeploy.patching import install
from engines.lmdeploy.policies import EnginePolicies, first_policies
from engines.lmdeploy.settings import EngineSettings
from engines.lmdeploy.trie.eviction import eviction_of
from kvcontrol.core.blocks import CacheTier
from tests.support.block_trie import Paging, prompt

BLOCKS = 32


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    undo = install(eviction_hooks())
    yield
    undo()


class AtOnce(EngineCalls):
    """An engine that always has time."""

    def __call__(self, work: Callable[[], Any], *, timeout_s: float) -> Any:
        del timeout_s
        return work()


def operations(paging: Paging, calls: EngineCalls) -> EnginePolicies:
    manager = SimpleNamespace(num_gpu_blocks=BLOCKS)
    scheduler = SimpleNamespace(block_trie=paging.trie, block_manager=manager, seq_manager=None)
    engine = SimpleNamespace(scheduler=scheduler, cache_config=SimpleNamespace(num_reserved_gpu_blocks=0))
    return EnginePolicies(engine, None, calls)


def change(policies: EnginePolicies, **wanted: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(policies.table()[SET_POLICY](json.dumps(wanted).encode()))
    return found


def test_adaptive_chooses_in_every_tier_unless_the_settings_name_another_policy() -> None:
    assert first_policies(EngineSettings(), chooses=True) == dict.fromkeys(
        (CacheTier.HBM, CacheTier.DDR, CacheTier.NVME), "adaptive"
    )
    named = EngineSettings(hbm_policy="lru", nvme_policy="mq(lifetime=2)")
    assert first_policies(named, chooses=True) == {
        CacheTier.HBM: "lru",
        CacheTier.DDR: "adaptive",
        CacheTier.NVME: "mq(lifetime=2)",
    }


def test_where_lmdeploy_chooses_what_leaves_hbm_no_policy_is_put_in_charge_that_nobody_named() -> None:
    assert CacheTier.HBM not in first_policies(EngineSettings(), chooses=False)
    assert first_policies(EngineSettings(hbm_policy="lru"), chooses=False)[CacheTier.HBM] == "lru"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"kind": "eviction", "name": "best"}, "unknown policy 'best'"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": 0}}, "lifetime is 0; allowed is"),
        ({"kind": "schedule", "name": "best"}, "unknown strategy 'best'"),
        ({"kind": "schedule", "name": "hybrid", "params": {"class_s": -1}}, "class_s is -1; allowed is"),
        ({"kind": "pace", "name": "best"}, "unknown pace 'best'"),
        ({"kind": "pace", "name": "itl_target", "params": {"itl_target_ms": 0}}, "itl_target_ms is 0; allowed is"),
        ({"kind": "pace", "name": "alternate", "tier": "HBM"}, "a pace has no tier; leave out 'HBM'"),
        ({"kind": "shadow", "name": "lru,best"}, "unknown policy 'best'"),
        ({"kind": "shadow", "name": "," * 1_000}, "no policy is named"),
        ({"kind": "shadow", "name": "," * 60_000}, r"length <= 1024 - at `\$\.name`"),
        ({"kind": "x" * 65, "name": "lru"}, r"length <= 64 - at `\$\.kind`"),
        ({"kind": "eviction", "name": "mq", "params": {"lifetime": "x" * 1_025}}, "length <= 1024"),
        ({"kind": "eviction", "name": "mq", "params": {"x" * 65: 1}}, "length <= 64"),
    ],
)
def test_what_cannot_be_is_refused_without_the_engine(wanted: dict[str, object], why: str) -> None:
    policies = operations(Paging(BLOCKS), EngineCalls())  # whose loop never gets to anything
    with pytest.raises(RefusedError, match=why):
        change(policies, **wanted)
    assert policies.refused == 1


@pytest.mark.parametrize(
    ("kind", "name"), [("eviction", "mq"), ("schedule", "hybrid"), ("shadow", "lru,mq"), ("pace", "alternate")]
)
def test_what_can_be_waits_for_the_engine(kind: str, name: str) -> None:
    with pytest.raises(EngineBusyError):
        change(operations(Paging(BLOCKS), EngineCalls()), kind=kind, name=name)


def test_shadows_that_are_followed_already_go_on_counting() -> None:
    paging = Paging(BLOCKS)
    policies = operations(paging, AtOnce())
    change(policies, kind="shadow", name="lru, mq(lifetime=2)")
    eviction = eviction_of(paging.trie)
    assert eviction is not None
    paging.serve(prompt(1, 3))
    for name, requests in (("lru,mq( lifetime=2 )", 1), ("lru", 0)):
        change(policies, kind="shadow", name=name)
        watched = eviction.shadows.policies
        assert watched is not None
        assert watched.report().requests == requests


def test_shadows_count_from_when_they_are_named() -> None:
    paging = Paging(BLOCKS)
    policies = operations(paging, AtOnce())
    eviction = eviction_of(paging.trie)
    assert eviction is not None
    eviction.defer(60.0)
    paging.serve(prompt(1, 3))
    change(policies, kind="shadow", name="lru")
    eviction.settle_now()
    watched = eviction.shadows.policies
    assert watched is not None
    assert watched.report().requests == 0
