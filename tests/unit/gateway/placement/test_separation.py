"""Plans of a gateway: what they say, what is called for them, and when a prompt is computed elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from gateway.fingerprint import Gap
from gateway.placement.planner import Planner
from gateway.placement.separation import RequestSize, Separation
from gateway.registry import Instance
from gateway.routing import POLICIES, Calibration, Candidate, LearnedAffinity, RecentRoutes
from kvcontrol.core import CacheTier
from kvcontrol.core.roles import EngineRole, KVTransport
from kvcontrol.scheduler_ir import (
    Device,
    Handover,
    HybridOnly,
    LegKind,
    PhaseLimits,
    Placement,
    SplitReason,
    ThresholdSeparator,
    render,
)
from lab.research.ir.legs import legs_of
from tests.unit.gateway.placement.test_planner import COSTS, World, instance

SIZE = RequestSize(request_id="r", prompt_tokens=500, max_tokens=64, separable=True)
DOMAINS = {KVTransport.MIGRATION: "tcp"}


def candidate(name: str, tiers: dict[CacheTier, int]) -> Candidate:
    matched = sum(tiers.values())
    return Candidate(
        instance=instance(name, publishes=True).id,
        matched_tokens=matched,
        tokens_by_tier=tiers,
        expected_tokens=matched,
    )


def test_the_calls_of_a_plan_are_those_of_its_graph_whoever_is_in_it() -> None:
    separation = Separation(HybridOnly())
    held: Sequence[dict[CacheTier, int]] = ({}, {CacheTier.HBM: 32}, {CacheTier.HBM: 16, CacheTier.NVME: 64})
    pairs = (("d", "p"), ("p", "d"), ("prefills", "answers"), ("d", "p"))  # some come twice, and are kept
    for (d, p), transport, of_answer, of_prefill, tokens in product(pairs, KVTransport, held, held, (1, 100, 4000)):
        elsewhere = Placement(answer=Device(d), handover=Handover(prefill=Device(p), transport=transport))
        size = SIZE._replace(prompt_tokens=tokens)
        answer, prefill = candidate(d, of_answer), candidate(p, of_prefill)
        plans = [separation.hybrid("x", size, answer), separation.plan("x", size, elsewhere, answer, prefill)]
        for plan in plans:
            assert plan.legs == legs_of(plan.ir_graph)
            assert plan.target_instance_id == d
            assert plan.request_ids == ("r",)


def test_what_is_kept_of_an_instance_is_forgotten_with_it() -> None:
    separation = Separation(HybridOnly())
    plan = separation.hybrid("x", SIZE, candidate("d", {}))
    assert separation.hybrid("y", SIZE, candidate("d", {})).legs is plan.legs
    separation.forget(instance("d", publishes=True).id)
    assert separation.hybrid("z", SIZE, candidate("d", {})).legs is not plan.legs


class Divided(World):
    """Two instances that answer, and some that compute prompts for them."""

    def __init__(self, *prefills: str, limits: PhaseLimits | None = None) -> None:
        super().__init__("d0", "d1")
        self.instances = tuple(reaching(each, EngineRole.DECODE) for each in self.instances)
        self.prefills = tuple(reaching(instance(name, publishes=True), EngineRole.PREFILL) for name in prefills)
        self.planner = Planner(
            policy=POLICIES["cost_aware"](COSTS),
            index=self.index,
            load=self.load,
            recent=RecentRoutes(lifetime_s=10),
            learned=LearnedAffinity(self.index, capacity_tokens=1 << 20),
            calibration=Calibration(COSTS),
            clock=lambda: self.now_s,
            separation=Separation(ThresholdSeparator(min_uncached_tokens=256, limits=limits or PhaseLimits())),
            prefilling=lambda model: self.prefills if model == "m" else (),
        )


def reaching(each: Instance, role: EngineRole) -> Instance:
    assert each.stats is not None
    return replace(each, role=role, stats=replace_stats(each, role))


def replace_stats(each: Instance, role: EngineRole) -> object:
    import msgspec

    return msgspec.structs.replace(each.stats, role=role, transports=DOMAINS)


def test_a_long_prompt_is_computed_elsewhere_and_the_plan_says_so() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    assert [leg.kind for leg in plan.execution.legs] == [LegKind.PREFILL, LegKind.HANDOVER, LegKind.ANSWER]
    assert [leg.device for leg in plan.execution.legs] == ["p0", "p0", plan.instance.id]
    assert plan.others == {"p0": world.prefills[0]}
    assert (plan.uncached_tokens, plan.elsewhere_tokens) == (0, 500)
    assert plan.route(1).endswith(";pd=separated;prefill=p0")
    assert render(plan.execution.ir_graph) == (
        "%kv = prefill @p0 {request=r, start=0, end=500}\n"
        f"%moved = transfer(%kv) @p0 {{request=r, start=0, end=500, target={plan.instance.id}, transport=migration}}\n"
        "evict(%kv) @p0 {request=r, reason=handed_over}\n"
        f"%answer, %tail = decode(%moved) @{plan.instance.id} {{request=r, start=500, max_tokens=64}}\n"
        "results %answer, %tail\n"
    )


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (SIZE._replace(prompt_tokens=200), SplitReason.SHORT),
        (SIZE._replace(separable=False), SplitReason.UNKNOWN_PROMPT),
    ],
)
def test_other_prompts_are_computed_where_they_are_answered(size: RequestSize, reason: SplitReason) -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, size.prompt_tokens)), world.instances, size=size)
    assert plan.split is not None
    assert plan.split.reason is reason
    assert [leg.kind for leg in plan.execution.legs] == [LegKind.ANSWER]
    assert plan.others == {}
    assert plan.uncached_tokens == size.prompt_tokens
    assert f";pd={reason}" in plan.route(1)


def test_a_prompt_that_the_answering_side_holds_is_computed_there() -> None:
    world = Divided("p0")
    first = world.planner.plan(world.prompt((1, 480)), world.instances, size=SIZE)
    world.store(first, world.prompt((1, 480)))
    again = world.planner.plan(world.prompt((1, 480), (2, 20)), world.instances, size=SIZE)
    assert again.instance.id == first.instance.id
    assert again.split is not None
    assert again.split.reason is SplitReason.HELD
    assert again.uncached_tokens == 36  # whole blocks are held


def test_who_computes_a_prompt_is_who_holds_most_of_it() -> None:
    world = Divided("p0", "p1")
    hashes = world.prompt((1, 480)).hashes(world.prefills[1].stats.identity)  # type: ignore[union-attr]
    world.index.extend(world.prefills[1].id, CacheTier.HBM, list(zip(hashes, [None, *hashes[:-1]], strict=True)))
    plan = world.planner.plan(world.prompt((1, 480), (2, 300)), world.instances, size=SIZE._replace(prompt_tokens=780))
    assert list(plan.others) == ["p1"]
    assert plan.elsewhere_tokens == 316  # whole blocks are held
    assert "%cached = load @p1 {request=r, start=0, end=464, tier=HBM}" in render(plan.execution.ir_graph)


def test_a_prefill_instance_is_given_no_more_than_its_limits_allow() -> None:
    world = Divided("p0", limits=PhaseLimits(requests=1))
    with world.load.placed(world.prefills[0].id, uncached_tokens=500, cold=True):
        plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
        assert plan.split is not None
        assert plan.split.reason is SplitReason.PREFILL_BUSY
    assert world.planner.plan(world.prompt((2, 500)), world.instances, size=SIZE).others


def test_one_that_failed_a_prompt_is_not_asked_again_for_it() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE, without={world.prefills[0].id})
    assert plan.others == {}


def test_a_prompt_without_a_fingerprint_is_answered_whole() -> None:
    world = Divided("p0")
    plan = world.planner.plan(Gap.MULTIMODAL, world.instances, size=SIZE)
    assert plan.split is None
    assert [leg.kind for leg in plan.execution.legs] == [LegKind.ANSWER]


def test_what_is_considered_is_what_would_be_planned() -> None:
    world = Divided("p0")
    considered = world.planner.consider(world.prompt((1, 500)), world.instances, size=SIZE)
    planned = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    assert considered.execution.ir_graph == planned.execution.ir_graph
    assert considered.route(1) == planned.route(1)


def test_the_time_of_a_prompt_that_was_computed_elsewhere_says_nothing_about_who_answered() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    world.planner.began(plan, took_s=60.0)
    assert world.planner.speeds(plan.instance) is None
