"""Tiers below HBM are told of prompts and uses where their policies ask for it, and of nothing where they don't."""

from collections.abc import Callable, Iterator

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import AdaptivePolicy, EvictionPolicy, LruPolicy, MqPolicy
from kvcontrol.kv_runtime import BlockRecord, Prompt
from tests.support.tiers import Rig, path

TOKENS = 4


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ddr=8, nvme=0)
    yield rig
    rig.hierarchy.check_integrity()
    rig.close()


def ask(rig: Rig, records: list[BlockRecord], *, prompt_tokens: int | None = None, tenant: str = "tenant") -> None:
    """Tell of a prompt of these blocks, as whoever owns the hierarchy does before it uses any of it."""
    rig.hierarchy.requested(
        Prompt(
            keys=[record.key for record in records],
            tokens=[record.tokens for record in records],
            tenant=tenant,
            block_tokens=TOKENS,
            prompt_tokens=TOKENS * len(records) if prompt_tokens is None else prompt_tokens,
        )
    )


def request(rig: Rig, records: list[BlockRecord]) -> None:
    """Serve a prompt: what isn't there is saved."""
    ask(rig, records)
    there = [place for place, record in enumerate(records) if rig.hierarchy.find(record.key) is not None]
    held = rig.hierarchy.claims.hold(rig.ids([records[place] for place in there]))
    rig.save([record for place, record in enumerate(records) if place not in there])
    rig.hierarchy.claims.release(held)


def decide_with(rig: Rig, make: Callable[[], EvictionPolicy]) -> None:
    rig.hierarchy.policies.swap(CacheTier.DDR, make)


def test_a_guard_counts_the_tokens_of_prompts_that_lie_below(rig: Rig) -> None:
    policy = AdaptivePolicy(8)
    decide_with(rig, lambda: policy)
    prompt = path(range(4))
    request(rig, prompt)
    assert policy.state().hits == 0
    ask(rig, [*prompt, *path([9], parent=3)], prompt_tokens=18)
    assert (policy.state().hits, policy.state().lru_hits) == (4 * TOKENS, 4 * TOKENS)
    ask(rig, prompt, prompt_tokens=14)
    assert policy.state().hits == 4 * TOKENS + 14, "of the last block only what the prompt has of it"


def test_what_comes_again_is_a_use_below_hbm_too(rig: Rig) -> None:
    decide_with(rig, lambda: MqPolicy(8))
    often, once = path(range(3)), path(range(10, 13))
    for _ in range(3):
        request(rig, often)
    request(rig, once)
    request(rig, path(range(20, 24)))
    assert [rig.tiers(record) for record in often] == ["DDR"] * 3, "MQ keeps what was used often, however long ago"
    assert "" in [rig.tiers(record) for record in once]


def test_lru_has_nothing_to_learn_from_it(rig: Rig) -> None:
    first, second = path(range(4)), path(range(10, 14))
    request(rig, first)
    request(rig, second)
    ask(rig, first)
    assert not LruPolicy.counts_uses
    request(rig, path(range(20, 22)))
    assert "" in [rig.tiers(record) for record in first], "a look-up that loads nothing is no use to LRU"
    assert [rig.tiers(record) for record in second] == ["DDR"] * 4


def test_another_tenants_prompt_uses_shared_blocks_and_is_not_told_to_their_policy(rig: Rig) -> None:
    policies: list[AdaptivePolicy] = []

    def make() -> AdaptivePolicy:
        policies.append(AdaptivePolicy(8))
        return policies[-1]

    decide_with(rig, make)
    prompt = path(range(3))
    request(rig, prompt)
    ask(rig, prompt, tenant="stranger")
    assert len(policies) == 1
    assert policies[0].state().hits == 3, "uses count one by one where nobody tells of prompts"
