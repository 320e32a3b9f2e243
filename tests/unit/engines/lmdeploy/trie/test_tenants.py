"""QoS in LMDeploy's own block trie: blocks are their tenants', and a loud one doesn't push a quiet one out."""

from collections.abc import Iterator

import pytest

from engines.lmdeploy.hooks.eviction import eviction_hooks
from engines.lmdeploy.hooks.tenancy import tenant_hooks
from engines.lmdeploy.patching import install
from engines.lmdeploy.trie.eviction import eviction_of
from engines.requests.urgency import Urgency
from kvcontrol.core.priority import Priority
from kvcontrol.kv_policy import make_policy
from tests.support.block_trie import BLOCK_TOKENS, Paging, prompt

BLOCKS = 32


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    undo = install([*eviction_hooks(), *tenant_hooks()])
    yield
    undo()


@pytest.mark.parametrize(("policy", "quiet_stays"), [("qos", True), ("lru", False)])
def test_a_loud_tenant_pushes_a_quiet_one_out_only_where_tenants_are_not_asked_for(
    policy: str,
    quiet_stays: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    paging = Paging(BLOCKS)
    eviction = eviction_of(paging.trie)
    assert eviction is not None
    eviction.swap(make_policy(policy, capacity_blocks=BLOCKS))
    paging.serve(prompt(1, 6), salt="quiet")
    for number in range(10, 20):
        paging.serve(prompt(number, 6), salt="loud")
    assert paging.serve(prompt(1, 6), salt="quiet") == (6 * BLOCK_TOKENS if quiet_stays else 0)
    eviction.check_integrity(paging.trie)
    assert not eviction.failed


def test_of_one_tenant_the_blocks_of_less_important_requests_go_first() -> None:
    paging = Paging(BLOCKS)
    eviction = eviction_of(paging.trie)
    assert eviction is not None
    eviction.swap(make_policy("qos", capacity_blocks=BLOCKS))
    paging.serve(prompt(1, 6), salt="one", urgency=Urgency(priority=Priority.HIGH))
    paging.serve(prompt(2, 6), salt="one", urgency=Urgency(priority=Priority.LOW))
    paging.serve(prompt(3, 6), salt="one")
    assert paging.trie.evict(6) == 6
    found = [paging.serve(prompt(seed, 6), salt="one") for seed in (1, 3, 2)]
    assert found == [6 * BLOCK_TOKENS, 6 * BLOCK_TOKENS, 0]
    assert not eviction.failed


def test_what_is_dear_to_get_back_stays_where_costs_are_measured() -> None:
    paging = Paging(BLOCKS)
    eviction = eviction_of(paging.trie)
    assert eviction is not None
    eviction.swap(make_policy("cost_aware", capacity_blocks=BLOCKS))
    for seed, reload_s in ((1, None), (2, 0.01), (3, 0.01)):
        eviction.ways_back = lambda reload_s=reload_s: (0.5, reload_s)  # type: ignore[misc]
        paging.serve(prompt(seed, 6))
    assert paging.trie.evict(12) == 12
    assert [paging.held_prefix(prompt(seed, 6)) for seed in (1, 2, 3)] == [6, 0, 0]
    assert not eviction.failed
