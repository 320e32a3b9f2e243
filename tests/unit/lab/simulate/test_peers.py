"""Other routers' formulas choose as their descriptions say."""

import pytest

from gateway.routing import Candidate, Query
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId
from lab.simulate.peers import PEERS, AibrixPrefixCache, DynamoCost, LlmDScorers, SglangCacheAware
from lab.simulate.peers.held import HeldPrompts


def each(name: str, *, matched: int = 0, running: int = 0, slots: int = 16, **more: int) -> Candidate:
    return Candidate(
        instance=InstanceId(name),
        matched_tokens=matched,
        tokens_by_tier={CacheTier.HBM: matched},
        expected_tokens=matched,
        in_flight=running,
        slots=slots,
        **more,
    )


def query(*candidates: Candidate, prompt: int = 1000) -> Query:
    return Query(prompt_tokens=prompt, gap=None, candidates=candidates)


def chosen(policy: object, *candidates: Candidate, prompt: int = 1000) -> str:
    return str(policy.choose(query(*candidates, prompt=prompt)).candidate.instance)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", PEERS.values(), ids=PEERS)
def test_idle_instances_take_cold_prompts_in_turn_and_a_holder_gets_its_own(make: object) -> None:
    policy = make(100_000)  # type: ignore[operator]
    assert chosen(policy, each("a", last_request=2), each("b", last_request=1)) == "b"
    assert chosen(policy, each("a", matched=900), each("b"), each("c")) == "a"


def test_sglang_drops_affinity_out_of_balance_and_for_short_matches() -> None:
    assert chosen(SglangCacheAware(), each("a", matched=900, running=60), each("b")) == "a"
    assert chosen(SglangCacheAware(), each("a", matched=900, running=65), each("b")) == "b"
    assert chosen(SglangCacheAware(), each("a", matched=300, running=1), each("b")) == "b"
    assert chosen(SglangCacheAware(), each("a", matched=301, running=1), each("b")) == "a"


def test_dynamo_weighs_what_is_cached_against_prefill_and_what_is_held() -> None:
    # 1,000 tokens of prompt: 600 cached weigh more than 500 of prefill before it, and not more than 1,000 held
    assert chosen(DynamoCost(), each("a", matched=600, prefill_tokens=500), each("b")) == "a"
    policy = DynamoCost()
    assert chosen(policy, each("a", matched=600), each("b")) == "a"
    assert chosen(policy, each("a", matched=600, running=1), each("b")) == "b"
    assert chosen(policy, each("a", matched=600), each("b", running=1)) == "a"
    disk = each("a", matched=900)._replace(tokens_by_tier={CacheTier.NVME: 900})
    assert chosen(DynamoCost(), disk, each("b", matched=300)) == "b"


def test_llm_d_adds_queue_use_and_prefix() -> None:
    policy = LlmDScorers(capacity_tokens=1000)
    assert chosen(policy, each("a", matched=700), each("b")) == "a"
    # a: 2 x 1 + 2 x (1 - 1000/1000) + 3 x 0.6 = 3.8; b: 2 + 2 + 0 = 4
    assert chosen(policy, each("a", matched=600, running=1), each("b")) == "b"
    # 3 x 0.7: 4.1; both hold a prompt each now, so it is 4.1 to 2
    assert chosen(policy, each("a", matched=700, running=1), each("b", running=1)) == "a"
    # a queue of its own costs a the whole of that score
    assert chosen(LlmDScorers(capacity_tokens=10**6), each("a", matched=600, running=17), each("b")) == "b"
    with pytest.raises(ValueError, match="room for 0 tokens"):
        LlmDScorers(capacity_tokens=0)


def test_what_is_held_is_the_last_prompts_of_those_that_run() -> None:
    held = HeldPrompts()
    for tokens in (100, 20, 3):
        held.placed(InstanceId("a"), tokens)
    assert [held.tokens(each("a", running=running)) for running in (3, 2, 2, 0)] == [123, 23, 23, 0]
    assert held.tokens(each("b", running=1)) == 0


def test_aibrix_takes_the_best_match_among_those_that_are_not_busier_than_most() -> None:
    assert chosen(AibrixPrefixCache(), each("a", matched=900, running=9), each("b")) == "b"
    assert chosen(AibrixPrefixCache(), each("a", matched=900, running=8), each("b", running=8), each("c")) == "a"
    busy = (each("a", matched=900, running=8), each("b", matched=100), each("c"), each("d"))
    assert chosen(AibrixPrefixCache(), *busy) == "b"
