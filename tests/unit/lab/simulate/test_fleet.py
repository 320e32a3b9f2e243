"""Fleets in virtual time: repeatable, conserving, and routed by the gateway's own code."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sim.behaviour import Behaviour
from gateway.routing import POLICIES
from kvcontrol.core.blocks import CacheTier
from lab.simulate.admission import AdmissionRules
from lab.simulate.fleet import Fleet, FleetPlan
from lab.simulate.outcome import FleetOutcome, quantile
from lab.simulate.workload import Workload
from lab.traces import Request
from tests.support.examples import examples
from tests.support.simulated import BLOCK, small_profile


def conversations(  # noqa: PLR0913 - what chats may differ in
    count: int, turns: int, *, every_s: float, blocks: int = 4, output: int = 6, shared: int = 2
) -> list[Request]:
    """Chats that take turns; each turn is the one before and ``blocks`` more, after a ``shared`` beginning."""
    return [
        Request(
            block_ids=array(
                "q", [*range(1, 1 + shared), *(1000 * chat + 10 + place for place in range(blocks * (turn + 1)))]
            ),
            block_tokens=BLOCK,
            prompt_tokens=(shared + blocks * (turn + 1)) * BLOCK,
            at_s=every_s * (turn * count + chat),
            output_tokens=output,
        )
        for turn in range(turns)
        for chat in range(count)
    ]


def serve(  # noqa: PLR0913 - what a fleet may differ in
    requests: Sequence[Request],
    *,
    router: str = "cost_aware",
    instances: int = 4,
    copies: int = 1,
    rules: AdmissionRules | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    **shape: object,
) -> FleetOutcome:
    fleet = Fleet(
        FleetPlan(
            profile=small_profile(**shape),
            instances=instances,
            make_policy=POLICIES[router],
            rules=rules or AdmissionRules(),
            behaviour=Behaviour(seed=seed, jitter=jitter),
        ),
        Workload(requests=requests, copies=copies, spread_s=1.0),
    )
    try:
        outcome = fleet.run()
        fleet.check_integrity()
    finally:
        fleet.close()
    return outcome


def said(outcome: FleetOutcome) -> FleetOutcome:
    """All of it but what is real time."""
    return replace(outcome, decision_us=0.0, gaps=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("router", POLICIES)
def test_every_request_is_answered_and_what_is_found_is_within_the_ceiling(router: str) -> None:
    outcome = serve(conversations(12, 4, every_s=0.2), router=router, ddr_blocks=200)
    assert len(outcome.ttft_s) == len(outcome.answer_s) == outcome.requests == 48
    assert outcome.shed == outcome.refused == 0
    assert 0 <= outcome.found_tokens <= outcome.ceiling_tokens
    assert outcome.found_tokens + outcome.computed_tokens == outcome.prompt_tokens
    assert list(outcome.ttft_s) == sorted(outcome.ttft_s)
    assert all(ttft <= answer for ttft, answer in zip(outcome.ttft_s, outcome.answer_s, strict=True))
    assert outcome.hotspot >= 1.0


def test_one_instance_with_room_finds_all_that_could_be_found() -> None:
    outcome = serve(conversations(5, 4, every_s=3.0), instances=1, hbm_blocks=400)
    assert outcome.of_ceiling == 1.0
    assert set(outcome.found_by_tier) == {CacheTier.HBM}


def test_routing_by_prefix_finds_more_than_turns_do() -> None:
    requests = conversations(13, 5, every_s=0.3)
    by_prefix, in_turn = serve(requests, hbm_blocks=150), serve(requests, router="round_robin", hbm_blocks=150)
    assert by_prefix.found_tokens > in_turn.found_tokens
    assert by_prefix.ttft(0.5) < in_turn.ttft(0.5)


@pytest.mark.parametrize("router", ["cost_aware", "prefix_affinity"])
@given(
    instances=st.integers(2, 6),
    shared=st.sampled_from([0, 1, 3, 8, 9]),
    every_s=st.sampled_from([0.05, 0.5, 5.0, 120.0]),
    turns=st.integers(1, 3),
)
@settings(max_examples=examples(40), deadline=None)
def test_a_beginning_that_all_share_starves_no_instance(
    router: str, instances: int, shared: int, every_s: float, turns: int
) -> None:
    requests = conversations(12 * instances, turns, every_s=every_s, shared=shared)
    outcome = serve(requests, router=router, instances=instances, hbm_blocks=300, max_batch=16)
    assert sum(outcome.requests_by_instance) == len(requests)
    assert min(outcome.requests_by_instance) >= len(requests) / instances / 3
    assert outcome.placed == " ".join(map(str, outcome.requests_by_instance))


def test_the_same_seed_gives_the_same_fleet_to_the_last_digit() -> None:
    requests = conversations(10, 3, every_s=0.1)
    assert said(serve(requests, jitter=0.2, seed=7)) == said(serve(requests, jitter=0.2, seed=7))
    assert said(serve(requests, jitter=0.2, seed=7)) != said(serve(requests, jitter=0.2, seed=8))


def test_copies_of_a_trace_share_nothing() -> None:
    requests = conversations(3, 1, every_s=0.5)
    once, thrice = serve(requests, instances=1), serve(requests, instances=1, copies=3, hbm_blocks=400)
    assert thrice.requests == 3 * once.requests
    assert thrice.ceiling_tokens == 3 * once.ceiling_tokens
    assert thrice.found_tokens <= thrice.ceiling_tokens


def test_what_finds_no_room_in_time_is_turned_away() -> None:
    requests = conversations(60, 1, every_s=0.0, output=30)
    patient = serve(requests, instances=1, rules=AdmissionRules(bound=1000, longest_s=1000.0))
    assert patient.shed_rate == 0.0
    hurried = serve(requests, instances=1, rules=AdmissionRules(bound=1000, longest_s=2.0))
    crowded = serve(requests, instances=1, rules=AdmissionRules(bound=5, longest_s=1000.0))
    for outcome in (hurried, crowded):
        assert outcome.shed > 0
        assert len(outcome.answer_s) + outcome.shed == outcome.requests
    assert hurried.ttft(0.99) < patient.ttft(0.99)


def test_a_prompt_that_no_engine_could_take_is_refused() -> None:
    huge = Request(block_ids=array("q", range(100)), block_tokens=BLOCK, prompt_tokens=100 * BLOCK, at_s=0.0)
    outcome = serve([huge, *conversations(2, 1, every_s=1.0)])
    assert outcome.refused == 1
    assert len(outcome.answer_s) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"requests": ()}, "no requests"),
        ({"copies": 0}, "copies"),
        ({"speed": 0.0}, "speed"),
        (
            {
                "requests": [
                    replace(each, block_tokens=size)
                    for size, each in zip((4, 8), conversations(2, 1, every_s=1.0), strict=True)
                ]
            },
            "one size",
        ),
    ],
)
def test_a_workload_that_can_not_be_is_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{"requests": conversations(2, 1, every_s=1.0)} | bad)  # type: ignore[arg-type]


def test_a_quantile_is_the_value_that_so_many_do_not_exceed() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    assert quantile([], 0.5) is None
