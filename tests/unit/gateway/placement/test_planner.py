"""Who gets what over many requests: evenness, affinity, and what an answer changes."""

from collections import Counter
from contextlib import ExitStack

import pytest

from gateway.fingerprint import Fingerprint, Gap
from gateway.placement.planner import Plan, Planner
from gateway.registry import Instance, InstanceSpec, InstanceState, LoadTracker, Model
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from gateway.types import Usage
from kvcontrol.core import CacheIdentity, CacheTier, Epoch, InstanceId
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats
from kvcontrol.core.hashing import token_bytes
from kvcontrol.prefix_reuse import FleetIndex

BLOCK = 16
IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="f", block_size_tokens=BLOCK)
COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02)


def stats() -> InstanceStats:
    return InstanceStats(
        epoch=Epoch("e"),
        engine="x",
        engine_version="1",
        device="cpu",
        started_at_s=0,
        context_length_tokens=8192,
        identity=IDENTITY,
        events=EventsInfo(endpoint="tcp://*:1", replay_endpoint="tcp://*:2", seq=-1),
        tiers={},
        load=LoadStats(running=0, waiting=0, max_batch_size=256),
        prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
    )


def instance(name: str, *, publishes: bool, life: int = 1) -> Instance:
    spec = InstanceSpec(id=InstanceId(name), url=f"http://{name}")
    return Instance(
        id=spec.id,
        url=spec.url,
        state=InstanceState.HEALTHY,
        reason="",
        models=(Model(id="m", card={}),),
        stats=stats() if publishes else None,
        life=life,
    )


class World:
    """A planner over instances that cache all they are sent, at once and for ever."""

    def __init__(self, *names: str, publishes: bool = True, policy: str = "cost_aware") -> None:
        self.now_s = 0.0
        self.instances = tuple(instance(name, publishes=publishes) for name in names)
        self.index = FleetIndex()
        self.load = LoadTracker(clock=lambda: self.now_s)
        self.doubted: list[str] = []
        self.planner = Planner(
            policy=POLICIES[policy](COSTS),
            index=self.index,
            load=self.load,
            recent=RecentRoutes(lifetime_s=10),
            learned=LearnedAffinity(self.index, capacity_tokens=1 << 20),
            calibration=Calibration(COSTS),
            clock=lambda: self.now_s,
            on_contradiction=lambda who, _: self.doubted.append(who),
        )

    def prompt(self, *parts: tuple[int, int]) -> Fingerprint:
        """``(seed, tokens)`` parts, one after the other."""
        tokens = [seed * 100_000 + number for seed, count in parts for number in range(count)]
        return Fingerprint(token_bytes(tokens), model="m", salt="s")

    def plan(self, prompt: Fingerprint | Gap) -> Plan:
        return self.planner.plan(prompt, self.instances)

    def serve(self, prompt: Fingerprint, *, cached: int | None = None) -> Plan:
        """One request after the other."""
        plan = self.plan(prompt)
        with self.load.placed(plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold):
            self.now_s += 0.1
        self.store(plan, prompt)
        usage = (
            None if cached is None else Usage(prompt_tokens=prompt.tokens, completion_tokens=1, cached_tokens=cached)
        )
        self.planner.computed(plan)
        self.planner.ended(plan, usage, took_s=0.1)
        return plan

    def store(self, plan: Plan, prompt: Fingerprint) -> None:
        if plan.instance.stats is not None:
            hashes = prompt.hashes(IDENTITY)
            self.index.extend(plan.instance.id, CacheTier.HBM, list(zip(hashes, [None, *hashes[:-1]], strict=True)))


@pytest.mark.parametrize("publishes", [True, False])
@pytest.mark.parametrize("policy", ["cost_aware", "prefix_affinity"])
@pytest.mark.parametrize("pause_s", [0.0, 300.0])
@pytest.mark.parametrize("shared", [64, 640])
def test_a_beginning_that_all_share_starves_no_instance_and_conversations_stay_where_they_are(
    publishes: bool,  # noqa: FBT001
    policy: str,
    pause_s: float,
    shared: int,
) -> None:
    world = World("a", "b", "c", "d", publishes=publishes, policy=policy)
    homes: dict[int, str] = {}
    counts = Counter[str]()
    for turn in range(1, 4):
        for chat in range(1, 41):
            prompt = world.prompt((99, shared), (chat, 640 * turn))
            plan = world.serve(prompt, cached=None)
            home = homes.setdefault(chat, plan.instance.id)
            assert plan.instance.id == home
            counts[home] += 1
            world.now_s += pause_s
    assert min(counts.values()) >= 10
    assert len(counts) == 4


def test_an_instance_that_got_nothing_for_long_gets_a_prompt_that_shares_a_beginning_alone() -> None:
    world = World("a", "b", policy="prefix_affinity")
    assert world.serve(world.prompt((99, 64), (1, 64))).instance.id == "a"
    for turn in range(2, 9):
        assert world.serve(world.prompt((99, 64), (1, 64 * turn))).decision.reason == "longest_match"
    spread = world.serve(world.prompt((99, 64), (2, 64)))
    assert (spread.instance.id, spread.decision.basis, spread.decision.reason) == ("b", "load", "starved")
    assert spread.uncached_tokens == 128


@pytest.mark.parametrize("policy", ["cost_aware", "prefix_affinity"])
def test_a_long_history_is_not_computed_again_for_an_instance_that_got_nothing(policy: str) -> None:
    world = World("a", "b", policy=policy)
    for edit in range(1, 30):  # a session whose last message changes: each prompt parts from the one before it
        assert world.serve(world.prompt((99, 20_000), (edit, 64))).instance.id == "a"
        world.now_s += 300.0


def test_cold_prompts_spread_evenly_over_idle_instances() -> None:
    world = World("a", "b", "c", "d")
    seen = Counter(world.serve(world.prompt((number, 500))).instance.id for number in range(40))
    assert max(seen.values()) - min(seen.values()) <= 1


def test_conversations_stay_where_they_are_and_are_spread_all_the_same() -> None:
    world = World("a", "b")
    homes = {each: world.serve(world.prompt((each, 800))).instance.id for each in range(8)}
    assert Counter(homes.values()) == {"a": 4, "b": 4}
    for turn in range(1, 6):
        for each, home in homes.items():
            assert world.serve(world.prompt((each, 800 + 200 * turn))).instance.id == home


@pytest.mark.parametrize("publishes", [True, False])
def test_a_system_prompt_that_all_share_does_not_draw_all_conversations_to_one_instance(*, publishes: bool) -> None:
    world = World("a", "b", publishes=publishes)
    seen = Counter(world.serve(world.prompt((0, 320), (number, 640))).instance.id for number in range(1, 61))
    assert min(seen.values()) >= 20


def test_a_burst_of_siblings_shares_one_prefill_until_another_instance_is_the_better_place() -> None:
    world = World("a", "b")
    prompt = world.prompt((1, 4000))
    with ExitStack() as stack:
        seen: Counter[str] = Counter()
        for number in range(400):
            plan = world.plan(world.prompt((1, 4000), (2 + number, 20)))
            stack.enter_context(
                world.load.placed(plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold)
            )
            seen[plan.instance.id] += 1
            if number == 15:
                assert len(seen) == 1
    assert len(seen) == 2
    assert min(seen.values()) > 100
    assert world.plan(prompt).instance.id in seen


def test_a_burst_of_long_prompts_spreads_from_the_first_decision_on() -> None:
    world = World("a", "b", "c", "d")
    with ExitStack() as stack:
        for number in range(16):
            plan = world.plan(world.prompt((number, 3000)))
            stack.enter_context(
                world.load.placed(plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold)
            )
        assert [world.load.of(each.id).in_flight for each in world.instances] == [4] * 4


def test_a_swapped_policy_decides_at_once_and_keeps_what_is_known() -> None:
    world = World("a", "b")
    prompt = world.prompt((1, 500))
    home = world.serve(prompt).instance.id
    world.planner.swap(POLICIES["round_robin"](COSTS))
    assert {world.serve(world.prompt((2, 100))).instance.id for _ in range(2)} == {"a", "b"}
    assert world.planner.policy == "round_robin"
    world.planner.swap(POLICIES["prefix_affinity"](COSTS))
    again = world.serve(prompt)
    assert (again.instance.id, again.matched_tokens) == (home, 496)


def test_considering_changes_nothing() -> None:
    world = World("a", "b")
    prompt = world.prompt((1, 500))
    first = world.planner.consider(prompt, world.instances)
    assert world.planner.consider(prompt, world.instances) == first
    assert first.decision.candidate.expected_tokens == 0
    assert set(first.decision.cost_s) == {"a", "b"}


def test_an_engine_that_publishes_nothing_gets_affinity_and_its_answers_correct_it() -> None:
    world = World("a", "b", publishes=False)
    prompt = world.prompt((1, 1000))
    first = world.serve(prompt, cached=0)
    again = world.serve(prompt, cached=999)
    assert (again.instance.id, again.decision.basis, again.matched_tokens) == (first.instance.id, "prefix", 960)
    lost = world.serve(prompt, cached=0)
    assert lost.instance.id == first.instance.id
    assert world.planner.ended(lost, Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=0), took_s=1) > 0


def test_a_text_that_can_not_be_tokenized_gives_affinity_there_and_a_reason_elsewhere() -> None:
    text = Fingerprint.of_text(b"word " * 1000, model="m", salt="s", gap=Gap.NO_TOKENIZER)
    plain = World("a", "b", publishes=False)
    home = plain.serve(text).instance.id
    again = plain.serve(text)
    assert (again.instance.id, again.decision.basis) == (home, "prefix")
    longer = Fingerprint.of_text(b"word " * 1000 + b"more", model="m", salt="s", gap=Gap.NO_TOKENIZER)
    assert plain.serve(longer).matched_tokens >= 1024
    other = Fingerprint.of_text(b"word " * 1000, model="m", salt="t", gap=Gap.NO_TOKENIZER)
    assert plain.serve(other).matched_tokens == 0
    assert World("a", "b").plan(text).decision.reason == "no_tokenizer"


def test_an_instance_that_was_away_is_expected_to_hold_nothing() -> None:
    world = World("a", publishes=False)
    prompt = world.prompt((1, 500))
    world.serve(prompt)
    world.now_s += 60
    assert world.plan(prompt).matched_tokens > 0
    world.now_s += 60
    world.instances = (instance("a", publishes=False, life=2),)
    assert world.plan(prompt).matched_tokens == 0


def test_answers_that_contradict_what_an_instance_announces_have_it_learned_anew() -> None:
    world = World("a")
    prompt = world.prompt((1, 500))
    world.serve(prompt)
    for _ in range(4):
        world.serve(prompt, cached=0)
    world.serve(prompt, cached=496)
    for _ in range(4):
        world.serve(prompt, cached=0)
    assert world.doubted == []
    world.serve(prompt, cached=0)
    assert world.doubted == ["a"]


def test_the_predicted_wait_follows_what_was_measured() -> None:
    world = World("a")
    for number in range(60):
        plan = world.plan(world.prompt((number, 1000)))
        assert plan.predicted_s is not None
        world.planner.began(plan, took_s=0.1)
    assert plan.predicted_s == pytest.approx(0.1, rel=0.2)
    world.planner.left(InstanceId("a"))
    assert world.planner.speeds(world.instances[0]) is None
