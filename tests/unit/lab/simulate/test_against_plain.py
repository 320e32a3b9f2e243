"""Fleets in virtual time beside a second simulator, written from the pages alone."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing import POLICIES
from lab.simulate.fleet import Fleet, FleetPlan
from lab.simulate.outcome import FleetOutcome
from lab.simulate.workload import Workload
from lab.traces import Request
from tests.support.examples import examples
from tests.support.plain_fleet import Instance, Job, PlainFleet, Times, cost_aware, prefix_affinity, round_robin
from tests.support.simulated import TIME, small_profile
from tests.unit.lab.simulate.test_fleet import conversations

TIMES = Times(
    step=TIME.step_s,
    token=TIME.token_s,
    pair=TIME.pair_s,
    context=TIME.context_s,
    decode=TIME.decode_step_s,
    sequence=TIME.sequence_s,
    decode_context=TIME.decode_context_s,
)
BATCH = 16
STEP_TOKENS = 32


def plain(requests: list[Request], router: Callable[[PlainFleet, Job], Instance], instances: int) -> list[Job]:
    fleet = PlainFleet(
        instances=[Instance(name=name, times=TIMES, batch=BATCH, step_tokens=STEP_TOKENS) for name in range(instances)],
        router=router,
    )
    return fleet.serve(requests)


def simulated(requests: list[Request], router: str, instances: int) -> FleetOutcome:
    fleet = Fleet(
        FleetPlan(
            profile=small_profile(hbm_blocks=9000, max_batch=BATCH, max_prefill_tokens=STEP_TOKENS),
            instances=instances,
            make_policy=POLICIES[router],
        ),
        Workload(requests=requests),
    )
    try:
        return fleet.run()
    finally:
        fleet.close()


def jittered(seed: int, *, count: int, turns: int, every_s: float) -> list[Request]:
    """Chats of unlike lengths at random times, in order."""
    dice = Random(seed)  # noqa: S311 - reproducible
    requests = [
        replace(each, at_s=each.at_s * dice.uniform(0.9, 1.1), output_tokens=dice.randint(1, 12))
        for each in conversations(count, turns, every_s=every_s, blocks=dice.randint(2, 14))
    ]
    return sorted(requests, key=lambda each: each.at_s)


@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([0.05, 0.2, 1.0]))
@settings(max_examples=examples(40), deadline=None)
def test_round_robin_is_the_same_to_the_digit(seed: int, instances: int, every_s: float) -> None:
    requests = jittered(seed, count=12, turns=3, every_s=every_s)
    jobs, outcome = plain(requests, round_robin, instances), simulated(requests, "round_robin", instances)
    assert sorted(job.first_s - job.at_s for job in jobs) == pytest.approx(list(outcome.ttft_s), rel=1e-9)
    assert sum(job.found for job in jobs) == outcome.found_tokens


@pytest.mark.parametrize(("name", "router"), [("prefix_affinity", prefix_affinity), ("cost_aware", cost_aware)])
@pytest.mark.parametrize("every_s", [0.08, 0.3, 2.0])
def test_the_other_routers_agree_within_five_per_cent(
    name: str, router: Callable[[PlainFleet, Job], Instance], every_s: float
) -> None:
    requests = jittered(7, count=60, turns=4, every_s=every_s)
    jobs, outcome = plain(requests, router, 4), simulated(requests, name, 4)
    assert sum(job.first_s - job.at_s for job in jobs) / len(jobs) == pytest.approx(outcome.ttft_mean_s, rel=0.05)
    assert sum(job.found for job in jobs) == pytest.approx(outcome.found_tokens, rel=0.05)
