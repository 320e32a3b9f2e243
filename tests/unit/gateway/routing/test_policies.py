"""One contract for all policies, then what makes each of them different."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import POLICIES, Candidate, CostModel, LeastLoad, PrefixAffinity, Query, RoundRobin
from kvcontrol.core import CacheTier, InstanceId

COSTS = CostModel(prefill_tokens_per_s=1000.0, decode_load_s=0.02)
A, B, C = (InstanceId(name) for name in "abc")


@st.composite
def queries(draw: st.DrawFn) -> Query:
    tokens = draw(st.none() | st.integers(0, 10_000))
    candidates = []
    for number in range(draw(st.integers(1, 5))):
        matched = draw(st.integers(0, tokens or 0))
        candidates.append(
            Candidate(
                instance=InstanceId(f"i{number}"),
                matched_tokens=matched,
                expected_tokens=draw(st.integers(matched, tokens or 0)),
                in_flight=draw(st.integers(0, 50)),
                prefill_tokens=draw(st.integers(0, 50_000)),
                foreign_requests=draw(st.integers(0, 5)),
                last_turn=draw(st.integers(0, 9)),
                last_cold_turn=draw(st.integers(0, 9)),
            )
        )
    return Query(prompt_tokens=tokens, gap="no_tokenizer" if tokens is None else None, candidates=tuple(candidates))


@pytest.mark.parametrize("name", POLICIES)
@given(query=queries())
def test_every_policy_chooses_a_candidate_with_a_reason_and_always_the_same(name: str, query: Query) -> None:
    policy = POLICIES[name](COSTS)
    decision = policy.choose(query)
    assert decision.candidate in query.candidates
    assert decision.basis
    assert decision.reason
    assert policy.choose(query) == decision
    assert policy.name == name


@pytest.mark.parametrize("name", POLICIES)
@given(query=queries())
def test_the_order_of_the_candidates_decides_nothing(name: str, query: Query) -> None:
    policy = POLICIES[name](COSTS)
    turned = Query(prompt_tokens=query.prompt_tokens, gap=query.gap, candidates=query.candidates[::-1])
    assert policy.choose(turned).candidate == policy.choose(query).candidate


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_without_a_fingerprint_says_so(name: str) -> None:
    query = Query(prompt_tokens=None, gap="multimodal", candidates=(Candidate(instance=A),))
    assert POLICIES[name](COSTS).choose(query).reason == "multimodal"


def test_round_robin_takes_whoever_waited_longest() -> None:
    candidates = (
        Candidate(instance=A, last_turn=3),
        Candidate(instance=B, last_turn=1),
        Candidate(instance=C, last_turn=2),
    )
    assert RoundRobin(COSTS).choose(Query(prompt_tokens=1, gap=None, candidates=candidates)).candidate.instance == B


def test_least_load_counts_prefill_own_and_foreign_requests() -> None:
    candidates = (
        Candidate(instance=A, prefill_tokens=100),
        Candidate(instance=B, in_flight=2),
        Candidate(instance=C, foreign_requests=3),
    )
    decision = LeastLoad(COSTS).choose(Query(prompt_tokens=1, gap=None, candidates=candidates))
    assert decision.candidate.instance == B
    assert decision.cost_s[A] == {"queue": 0.1, "decode": 0.0}
    assert decision.cost_s[B] == {"queue": 0.0, "decode": 0.04}
    assert decision.cost_s[C] == {"queue": 0.0, "decode": 0.06}


def prefix(*candidates: Candidate, tokens: int = 1000) -> tuple[str, str, str]:
    decision = PrefixAffinity(COSTS).choose(Query(prompt_tokens=tokens, gap=None, candidates=candidates))
    return decision.candidate.instance, decision.basis, decision.reason


def held(instance: InstanceId, tokens: int, **load: int) -> Candidate:
    return Candidate(
        instance=instance, matched_tokens=tokens, expected_tokens=tokens, matched_tiers=(CacheTier.HBM,), **load
    )


def test_the_longest_match_wins_among_equally_busy() -> None:
    assert prefix(held(A, 100), held(B, 900), Candidate(instance=C)) == ("b", "prefix", "longest_match")


def test_a_little_load_does_not_throw_affinity_away() -> None:
    assert prefix(held(A, 900, in_flight=10), Candidate(instance=B)) == ("a", "prefix", "longest_match")


def test_a_busy_enough_holder_loses() -> None:
    assert prefix(held(A, 900, prefill_tokens=5000), Candidate(instance=B)) == ("b", "load", "busy_holder")
    assert prefix(held(A, 900, prefill_tokens=5000), held(B, 100)) == ("b", "prefix", "busy_holder")


def test_what_was_just_routed_attracts_siblings_until_the_queue_is_too_long() -> None:
    def sibling(queue: int) -> Candidate:
        return Candidate(instance=A, expected_tokens=990, in_flight=1, prefill_tokens=queue)

    assert prefix(sibling(1000), Candidate(instance=B)) == ("a", "prefix", "just_routed")
    assert prefix(sibling(3000), Candidate(instance=B)) == ("b", "load", "busy_holder")


def test_cold_prompts_go_to_whoever_got_none_for_longest_whatever_warm_ones_came_between() -> None:
    assert prefix(
        Candidate(instance=A, last_cold_turn=7, last_turn=7), Candidate(instance=B, last_cold_turn=3, last_turn=9)
    ) == ("b", "load", "cold")
