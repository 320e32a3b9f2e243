"""One contract for all policies, then what makes each of them different."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import (
    POLICIES,
    Candidate,
    ConsistentHash,
    CostAware,
    CostModel,
    LeastLoad,
    PrefixAffinity,
    Query,
    RoundRobin,
    Speeds,
)
from gateway.routing.scoring import predicted_wait_s
from kvcontrol.core import CacheTier, InstanceId

COSTS = CostModel(prefill_tokens_per_s=1000.0, decode_load_s=0.02)
A, B, C = (InstanceId(name) for name in "abc")

SPEEDS = st.builds(
    Speeds,
    prefill_tokens_per_s=st.floats(1, 1e6),
    decode_load_s=st.floats(0, 1),
    base_s=st.floats(0, 1),
    reload_s_per_token=st.dictionaries(st.sampled_from(CacheTier), st.floats(0, 1e-2)),
    answer_s=st.floats(0, 100),
)


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
                slots=draw(st.integers(0, 8)),
                recent_tokens=draw(st.floats(0, 1e5)),
                speeds=draw(st.none() | SPEEDS),
                last_request=draw(st.integers(0, 9)),
                last_cold_request=draw(st.integers(0, 9)),
            )
        )
    return Query(
        prompt_tokens=tokens,
        gap="no_tokenizer" if tokens is None else None,
        candidates=tuple(candidates),
        key=draw(st.none() | st.binary(max_size=8)),
    )


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
    turned = Query(prompt_tokens=query.prompt_tokens, gap=query.gap, candidates=query.candidates[::-1], key=query.key)
    assert policy.choose(turned).candidate == policy.choose(query).candidate


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_without_a_fingerprint_says_so(name: str) -> None:
    query = Query(prompt_tokens=None, gap="multimodal", candidates=(Candidate(instance=A),))
    assert POLICIES[name](COSTS).choose(query).reason == "multimodal"


def test_round_robin_takes_whoever_waited_longest() -> None:
    candidates = (
        Candidate(instance=A, last_request=3),
        Candidate(instance=B, last_request=1),
        Candidate(instance=C, last_request=2),
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
    decision = CostAware(COSTS).choose(Query(prompt_tokens=tokens, gap=None, candidates=candidates))
    return decision.candidate.instance, decision.basis, decision.reason


def held(instance: InstanceId, tokens: int, **load: int) -> Candidate:
    return Candidate(
        instance=instance,
        matched_tokens=tokens,
        expected_tokens=tokens,
        tokens_by_tier={CacheTier.HBM: tokens},
        **load,
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
    assert prefix(sibling(4000), Candidate(instance=B)) == ("b", "load", "busy_holder")


def test_cold_prompts_go_to_whoever_got_none_for_longest_whatever_warm_ones_came_between() -> None:
    assert prefix(
        Candidate(instance=A, last_cold_request=7, last_request=7),
        Candidate(instance=B, last_cold_request=3, last_request=9),
    ) == ("b", "load", "cold")


def terms_of(candidate: Candidate, tokens: int = 1000) -> dict[str, float]:
    query = Query(prompt_tokens=tokens, gap=None, candidates=(candidate,))
    return dict(CostAware(COSTS).choose(query).cost_s[candidate.instance])


def test_costs_have_names_and_those_that_the_request_waits_for_are_its_predicted_wait() -> None:
    speeds = Speeds(
        prefill_tokens_per_s=2000,
        decode_load_s=0.01,
        base_s=0.05,
        reload_s_per_token={CacheTier.DDR: 0.0001, CacheTier.NVME: 0.001},
        answer_s=4,
    )
    candidate = Candidate(
        instance=A,
        matched_tokens=600,
        expected_tokens=600,
        tokens_by_tier={CacheTier.HBM: 100, CacheTier.DDR: 300, CacheTier.NVME: 200},
        in_flight=3,
        foreign_requests=2,
        prefill_tokens=500,
        slots=4,
        speeds=speeds,
    )
    terms = terms_of(candidate)
    assert terms == pytest.approx(
        {"base": 0.05, "prefill": 0.2, "load": 0.23, "queue": 0.25, "decode": 0.05, "slot": 2.0}
        | {"work": 0.2, "room": 0.2}
    )
    assert predicted_wait_s(terms) == pytest.approx(2.78)


def test_blocks_on_a_slow_disk_are_worth_less_than_computing_them_anew() -> None:
    slow = Speeds(prefill_tokens_per_s=1000, decode_load_s=0, reload_s_per_token={CacheTier.NVME: 0.01})
    on_disk = Candidate(
        instance=A, matched_tokens=800, expected_tokens=800, tokens_by_tier={CacheTier.NVME: 800}, speeds=slow
    )
    assert prefix(on_disk, Candidate(instance=B)) == ("b", "load", "busy_holder")
    in_memory = on_disk._replace(tokens_by_tier={CacheTier.HBM: 800})
    assert prefix(in_memory, Candidate(instance=B)) == ("a", "prefix", "longest_match")


def test_a_fast_instance_gets_cold_prompts_that_a_slow_one_would_take_longer_for() -> None:
    fast, slow = (Speeds(prefill_tokens_per_s=speed, decode_load_s=0) for speed in (5000, 500))
    candidates = (Candidate(instance=A, speeds=slow), Candidate(instance=B, speeds=fast, last_cold_request=9))
    assert prefix(*candidates)[0] == "b"


def test_nearly_equal_costs_tie_and_who_got_least_work_lately_is_next() -> None:
    nearly = Speeds(prefill_tokens_per_s=1001, decode_load_s=0.02)
    assert prefix(
        Candidate(instance=A, speeds=nearly, last_cold_request=2), Candidate(instance=B, last_cold_request=1)
    ) == (
        "b",
        "load",
        "cold",
    )
    assert prefix(Candidate(instance=A, recent_tokens=500), Candidate(instance=B, recent_tokens=900))[0] == "a"


def test_a_shared_beginning_does_not_keep_an_instance_that_got_much_more_than_others_and_a_conversation_does() -> None:
    assert prefix(held(A, 200, recent_tokens=900), Candidate(instance=B))[0] == "a"
    assert prefix(held(A, 200, recent_tokens=9000), Candidate(instance=B))[0] == "b"
    assert prefix(held(A, 950, recent_tokens=9000), Candidate(instance=B))[0] == "a"


def test_a_beginning_that_all_have_draws_a_prompt_nowhere() -> None:
    """Whoever got much lately is no dearer for it: with ``spread`` counted here, A would cost 0.9 s more."""
    shared = held(B, 512, prefill_tokens=300)
    assert prefix(held(A, 512, recent_tokens=9000), shared) == ("a", "prefix", "longest_match")
    assert "spread" not in dict(cost_of(A, held(A, 512, recent_tokens=9000), shared))
    assert "spread" in dict(cost_of(A, held(A, 600, recent_tokens=9000), shared))


def test_costs_that_tie_go_to_who_has_most_and_then_to_who_costs_least() -> None:
    assert prefix(held(A, 500), held(B, 510, prefill_tokens=33))[0] == "b"
    assert (
        prefix(held(A, 500, prefill_tokens=4, recent_tokens=1), held(B, 500, prefill_tokens=3, recent_tokens=2))[0]
        == "b"
    )
    assert prefix(held(A, 500, recent_tokens=2), held(B, 500, recent_tokens=1))[0] == "b"


def test_a_short_turn_stays_where_it_lies_while_a_long_prompt_is_computed_there_and_a_long_one_does_not() -> None:
    """Between two chunks of a long prompt short ones get a turn, so all of it but a chunk is no wait for them."""
    candidates = (held(A, 6000, prefill_tokens=40_100, passed_tokens=31_808), Candidate(instance=B))
    short, longer = (
        CostAware(COSTS).choose(Query(prompt_tokens=tokens, gap=None, candidates=candidates))
        for tokens in (14_000, 20_000)
    )
    assert (short.candidate.instance, short.reason) == ("a", "longest_match")
    assert short.cost_s[A]["queue"] == pytest.approx(8.292)
    assert short.wait_s == pytest.approx(predicted_wait_s(short.cost_s[A]))
    assert (longer.candidate.instance, longer.reason) == ("b", "busy_holder")
    assert longer.cost_s[A]["queue"] == pytest.approx(40.1)


def cost_of(instance: InstanceId, *candidates: Candidate) -> Mapping[str, float]:
    query = Query(prompt_tokens=1000, gap=None, candidates=candidates)
    return CostAware(COSTS).choose(query).cost_s[instance]


def affine(*candidates: Candidate) -> tuple[str, str, str]:
    decision = PrefixAffinity(COSTS).choose(Query(prompt_tokens=1000, gap=None, candidates=candidates))
    return decision.candidate.instance, decision.basis, decision.reason


def test_prefix_affinity_takes_the_longest_match_within_a_window_of_load() -> None:
    assert affine(held(A, 100, in_flight=8), held(B, 50)) == ("a", "prefix", "longest_match")
    assert affine(held(A, 100, in_flight=9), held(B, 50)) == ("b", "prefix", "busy_holder")
    assert affine(held(A, 100, in_flight=9), Candidate(instance=B)) == ("b", "load", "busy_holder")
    assert affine(Candidate(instance=A, last_cold_request=2), Candidate(instance=B, last_cold_request=1))[0] == "b"


def hashed(key: bytes | None, *candidates: Candidate) -> tuple[str, str]:
    decision = ConsistentHash(COSTS).choose(Query(prompt_tokens=1, gap=None, candidates=candidates, key=key))
    return decision.candidate.instance, decision.reason


def test_consistent_hash_keeps_a_key_where_it_is_and_moves_only_those_of_an_instance_that_goes() -> None:
    fleet = [Candidate(instance=InstanceId(f"i{number}")) for number in range(8)]
    keys = [number.to_bytes(4, "big") for number in range(4000)]
    owners = {key: hashed(key, *fleet)[0] for key in keys}
    shares = [sum(owner == each.instance for owner in owners.values()) for each in fleet]
    assert min(shares) > 400
    assert max(shares) < 600
    after = {key: hashed(key, *fleet[1:])[0] for key in keys}
    assert {owners[key] for key in keys if after[key] != owners[key]} == {"i0"}


def test_consistent_hash_passes_over_an_owner_that_has_more_than_its_share() -> None:
    owner, reason = hashed(b"k", *(Candidate(instance=each) for each in (A, B, C)))
    assert reason == "owner"
    busy = (Candidate(instance=each, in_flight=10 if each == owner else 1) for each in (A, B, C))
    other, reason = hashed(b"k", *busy)
    assert (other != owner, reason) == (True, "busy_owner")
    assert hashed(None, Candidate(instance=A, in_flight=1), Candidate(instance=B)) == ("b", "no_key")
