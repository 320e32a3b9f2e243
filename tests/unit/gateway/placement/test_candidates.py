"""Candidates that are kept in seats, against ones that are made anew for each request."""

import random
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.fingerprint import Fingerprint, Gap
from gateway.placement.candidates import Candidates
from gateway.registry import Instance, InstanceSpec, InstanceState, LoadTracker, Permit
from gateway.routing import Calibration, Candidate, CostAware, CostModel, LearnedAffinity, Query, RecentRoutes, Speeds
from gateway.routing.learned import BLOCK_TOKENS, learned_identity, sent_identity
from gateway.routing.scoring import predicted_wait_s
from kvcontrol.core import BlockHash, BlockStored, CacheIdentity, CacheTier, Epoch, InstanceId
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats, TierStats
from kvcontrol.core.hashing import token_bytes
from kvcontrol.prefix_reuse import FleetIndex
from tests.support.examples import examples

BLOCK = 4
COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02, spread=0.1)


def stats(revision: str, slots: int) -> InstanceStats:
    return InstanceStats(
        epoch=Epoch("e"),
        engine="x",
        engine_version="1",
        device="cpu",
        started_at_s=0,
        context_length_tokens=8192,
        identity=CacheIdentity(model="m", revision=revision, kv_dtype="f", block_size_tokens=BLOCK),
        events=EventsInfo(endpoint="tcp://*:1", replay_endpoint="tcp://*:2", seq=-1),
        tiers={CacheTier.DDR: TierStats(capacity_blocks=9, used_blocks=0, cached_blocks=0, block_bytes=4096)},
        load=LoadStats(running=0, waiting=0, max_batch_size=slots),
        prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
    )


class NaiveCandidates:
    """The same answers, from everything there is, each time."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def of(self, prompt: Fingerprint | Gap, instances: Sequence[Instance]) -> list[Candidate]:
        return [self.one(prompt, each) for each in instances]

    def one(self, prompt: Fingerprint | Gap, instance: Instance) -> Candidate:
        world, name = self.world, instance.id
        load = world.load.of(name)
        matched, expected, tiers = 0, 0, {}
        identity = self.identity(prompt, instance)
        if isinstance(prompt, Fingerprint) and identity is not None:
            hashes, size = prompt.hashes(identity), identity.block_size_tokens
            if (match := dict(world.index.match(hashes)).get(name)) is not None:
                matched = match.blocks
                tiers = {tier: blocks * size for tier, blocks in match.by_tier.items()}
            expected = matched + world.recent.expected(hashes[matched:], name, world.now_s)
            if prompt.gap is not None and instance.stats is not None:
                expected = max(expected, self.sent_before(hashes, name))
            matched, expected = matched * size, expected * size
        return Candidate(
            instance=name,
            matched_tokens=matched,
            tokens_by_tier=tiers,
            expected_tokens=expected,
            in_flight=load.in_flight,
            prefill_tokens=load.prefill_tokens,
            foreign_requests=instance.foreign_requests,
            slots=0 if instance.stats is None else instance.stats.load.max_batch_size,
            recent_tokens=load.recent_tokens,
            last_request=load.last_request,
            last_cold_request=load.last_cold_request,
            speeds=world.candidates.speeds(instance),
            passed_tokens=0 if instance.stats is None else max(0, world.load.tally(name).chunked_tokens - 8192),
        )

    def sent_before(self, hashes: Sequence[BlockHash], name: InstanceId) -> int:
        """How much of it was sent there, where nobody was sent more."""
        places = [self.world.homes.place(each, self.world.now_s) for each in hashes]
        known = places.index(None) if None in places else len(places)
        return known if known and places[known - 1] == name else 0

    def identity(self, prompt: Fingerprint | Gap, instance: Instance) -> CacheIdentity | None:
        if isinstance(prompt, Gap):
            return None
        if instance.stats is None:
            return learned_identity("m", textual=prompt.textual)
        return sent_identity("m") if prompt.textual else instance.stats.identity


class World:
    """Instances of three kinds: two revisions that publish, and ones that publish nothing."""

    def __init__(self, count: int) -> None:
        self.now_s = 100.0
        self.index = FleetIndex()
        self.load = LoadTracker(clock=lambda: self.now_s)
        self.recent = RecentRoutes(lifetime_s=10)
        self.homes = RecentRoutes(lifetime_s=60)
        self.learned = LearnedAffinity(self.index, capacity_tokens=1 << 20)
        self.calibration = Calibration(COSTS)
        self.candidates = Candidates(
            index=self.index,
            load=self.load,
            recent=self.recent,
            homes=self.homes,
            learned=self.learned,
            calibration=self.calibration,
            clock=lambda: self.now_s,
        )
        self.instances = [self.instance(number) for number in range(count)]
        self.places: list[ExitStack] = []
        self.permits: list[Permit] = []

    def instance(self, number: int, foreign: int = 0) -> Instance:
        spec = InstanceSpec(id=InstanceId(f"i{number}"), url=f"http://{number}")
        publishes = number % 3 < 2
        return Instance(
            id=spec.id,
            url=spec.url,
            state=InstanceState.HEALTHY,
            reason="",
            stats=stats(f"r{number % 3}", slots=number % 4) if publishes else None,
            life=1,
            foreign_requests=foreign,
        )

    def send(self, source: Fingerprint | Gap, at: Instance, number: int, identity: CacheIdentity | None) -> None:
        place = ExitStack()
        permit = place.enter_context(self.load.placed(at.id, uncached_tokens=number * 1500, cold=number % 2 == 0))
        self.permits.append(permit)
        self.places.append(place)
        if isinstance(source, Fingerprint) and identity is not None:
            hashes = source.hashes(identity)
            self.recent.remember(hashes[: number + 1], at.id, self.now_s)
            if source.gap is not None:
                self.homes.remember(hashes[: 2 * number + 1], at.id, self.now_s)
            if at.stats is None:
                self.learned.computed(self.learned.guess(at.id, hashes, 0))

    def store(self, source: Fingerprint | Gap, at: Instance, number: int) -> None:
        if at.stats is None or isinstance(source, Gap) or source.textual:
            return
        hashes = tuple(source.hashes(at.stats.identity))[: number + 1]
        tier = CacheTier.HBM if number % 2 else CacheTier.DDR
        event = BlockStored(block_hashes=hashes, parent=None, token_ids=(), block_size_tokens=BLOCK, tier=tier)
        self.index.apply(at.id, event)

    def happen(self, step: str, source: Fingerprint | Gap, at: Instance, number: int) -> None:
        match step:
            case "began" if self.permits:
                self.permits[number % len(self.permits)].first_byte()
            case "gone":
                self.candidates.forget(at.id)
                self.load.forget(at.id)
            case "ends" if self.places:
                self.places.pop(number % len(self.places)).close()
            case "stored":
                self.store(source, at, number)
            case "took":
                self.calibration.observe(at.id, tokens=number * 50, running=number, took_s=0.01 + number / 50)
                self.candidates.observed(at.id)
            case "checked":
                place = self.instances.index(at)
                self.instances[place] = self.instance(place, foreign=number)
            case "later":
                self.now_s += number / 3


def prompt(kind: int) -> Fingerprint | Gap:
    if kind == 0:
        return Gap.MULTIMODAL
    if kind == 1:
        return Fingerprint.of_text(b"x" * 5000, model="m", salt="s", gap=Gap.NO_TOKENIZER)
    gap = Gap.MULTIMODAL if kind == 2 else None
    return Fingerprint(token_bytes([7] * 8 + [kind] * 3 * BLOCK_TOKENS), model="m", salt="s", gap=gap)


KINDS = ["ask", "ask some", "ask", "sent", "sent", "began", "ends", "stored", "took", "checked", "later", "gone"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=40)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, count=st.integers(1, 7))
def test_candidates_say_what_is_true_now(steps: list[tuple[str, int]], count: int) -> None:
    walk(steps, count)


@pytest.mark.parametrize("seed", range(3))
def test_candidates_say_what_is_true_after_a_long_time_too(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    walk([(rng.choice(KINDS), rng.randrange(10)) for _ in range(400)], count=7)


def walk(steps: list[tuple[str, int]], count: int) -> None:
    """Ask about all, and about some in another order, as where one drains, has failed, or prefills for others."""
    world = World(count)
    naive = NaiveCandidates(world)
    kept = CostAware(COSTS)
    for step, number in [*steps, ("ask", 2), ("ask", 0), ("ask some", 1)]:
        source, at = prompt(number % 4), world.instances[number % count]
        if step == "ask":
            compare(world, naive, kept, source, world.instances)
        elif step == "ask some":
            compare(world, naive, kept, source, world.instances[number % count :: -1])
        elif step == "sent":
            world.send(source, at, number, naive.identity(source, at))
        else:
            world.happen(step, source, at, number)
    for place in world.places:
        place.close()


def compare(
    world: World, naive: NaiveCandidates, kept: CostAware, source: Fingerprint | Gap, some: Sequence[Instance]
) -> None:
    """The policy that looks at columns, and keeps what it has worked out, decides as on paper."""
    field = world.candidates.of(some, world.candidates.lookups(source))
    tokens = source.tokens if isinstance(source, Fingerprint) else None
    now = [field.at(place) for place in range(len(field))]
    expected = [near(each) for each in naive.of(source, some)]
    assert [near(each) for each in field] == expected
    assert [near(each) for each in now] == expected
    decision = kept.choose(Query(prompt_tokens=tokens, gap=None, candidates=field))
    assert decision.candidate.instance == on_paper(now, tokens)
    assert near(decision.candidate) in expected


def on_paper(candidates: Sequence[Candidate], tokens: int | None) -> InstanceId:
    """Whom ``cost_aware`` takes, from the cost of each."""
    held = {each.expected_tokens for each in candidates}
    least = min(each.recent_tokens for each in candidates)
    costs = [on_paper_s(each, tokens, each.recent_tokens - least if len(held) > 1 else 0.0) for each in candidates]
    bound_s = min(costs) + max(0.005, min(costs) * 0.05)
    tied = [(each, cost_s) for each, cost_s in zip(candidates, costs, strict=True) if cost_s <= bound_s]

    def order(one: tuple[Candidate, float]) -> tuple[float, float, float, float, InstanceId]:
        each, cost_s = one
        if any(held):
            return 0, -each.expected_tokens, cost_s, each.recent_tokens, each.instance
        excess = min(COSTS.spread * (each.recent_tokens - least), 8192)
        return each.running, excess, each.last_cold_request, cost_s, each.instance

    return min(tied, key=order)[0].instance


def on_paper_s(each: Candidate, tokens: int | None, excess: float) -> float:
    speeds = each.speeds or COSTS.speeds()
    token_s = 3 / speeds.prefill_tokens_per_s
    before = each.prefill_tokens
    if tokens is not None and tokens - each.expected_tokens <= 8192:
        before -= each.passed_tokens
    cost_s = speeds.base_s + before / 3 * token_s + each.running * max(0.005, speeds.decode_load_s)
    if each.slots and each.running >= each.slots:
        cost_s += (each.running - each.slots + 1) * speeds.answer_s / each.slots
    if tokens is not None and each.expected_tokens:
        cost_s -= each.expected_tokens * token_s
        held = each.tokens_by_tier.items() if each.matched_tokens else ()
        reload_s = sum(count * speeds.reload_s_per_token.get(tier, 0.0) for tier, count in held)
        cost_s += reload_s
    return cost_s + (float(tokens or 0) + min(COSTS.spread / 3 * excess, 8192 / 3)) * token_s


def near(candidate: Candidate) -> tuple[object, ...]:
    """What has to be equal; the work given lately may be a fifth of a second old, and what is known of an instance that
    is unlike the others grows old when all are told new speeds.
    """
    speeds = candidate.speeds
    return (
        *candidate._replace(recent_tokens=0.0, speeds=None),
        pytest.approx(candidate.recent_tokens, rel=0.01),
        speeds is not None and dict(speeds.reload_s_per_token),
    )


def test_all_are_told_new_speeds_at_once_and_one_that_answers_slowly_its_own_as_well() -> None:
    world = World(24)

    def answer(number: int, took_s: float) -> None:
        world.calibration.observe(world.instances[number].id, tokens=1000, running=0, took_s=took_s)
        world.candidates.observed(world.instances[number].id)

    def speeds() -> list[float]:
        seen = world.candidates.of(world.instances, world.candidates.lookups(Gap.MULTIMODAL))
        return [each.speeds.prefill_tokens_per_s for each in seen if each.speeds is not None]

    for _ in range(4):
        for number in range(24):
            answer(number, 0.5)
            assert len(set(speeds())) == 1, "equals look equal, whoever was asked last"
    before = speeds()[0]
    for _ in range(12):
        answer(1, 5.0)
        answer(2, 0.5)
    found = speeds()
    assert len({each for number, each in enumerate(found) if number not in {1, 2}}) == 1
    assert found[1] < before / 2
    exact = world.candidates.speeds(world.instances[0])
    assert exact is not None
    assert found[0] == exact.prefill_tokens_per_s


SPEEDS = st.none() | st.builds(
    Speeds,
    prefill_tokens_per_s=st.floats(1, 1e5),
    decode_load_s=st.floats(0, 1),
    base_s=st.floats(0, 1),
    reload_s_per_token=st.dictionaries(st.sampled_from(CacheTier), st.floats(0, 0.01)),
    answer_s=st.floats(0, 100),
)
CANDIDATES = st.builds(
    Candidate,
    instance=st.just(InstanceId("i")),
    matched_tokens=st.integers(0, 500),
    tokens_by_tier=st.dictionaries(st.sampled_from(CacheTier), st.integers(1, 300)),
    expected_tokens=st.integers(0, 900),
    in_flight=st.integers(0, 50),
    prefill_tokens=st.integers(0, 10**6),
    foreign_requests=st.integers(0, 9),
    slots=st.integers(0, 8),
    recent_tokens=st.floats(0, 1e6),
    last_request=st.integers(0, 3),
    last_cold_request=st.integers(0, 3),
    speeds=SPEEDS,
    passed_tokens=st.just(0) | st.integers(1, 10**5),
).map(lambda each: each._replace(prefill_tokens=each.prefill_tokens + each.passed_tokens))


@settings(deadline=None, max_examples=examples(150))
@given(found=st.lists(CANDIDATES, min_size=1, max_size=5), tokens=st.none() | st.integers(900, 10**5))
def test_the_cheapest_by_the_sum_is_the_cheapest_by_its_named_terms(found: list[Candidate], tokens: int | None) -> None:
    named = tuple(
        each._replace(
            instance=InstanceId(f"i{number}"), tokens_by_tier=each.tokens_by_tier if each.matched_tokens else {}
        )
        for number, each in enumerate(found)
    )
    decision = CostAware(COSTS).choose(Query(prompt_tokens=tokens, gap=None, candidates=named))
    total = {name: sum(terms.values()) for name, terms in decision.cost_s.items()}
    assert set(total) == {each.instance for each in named}
    lowest = min(total.values())
    bound = lowest + max(0.005, lowest * 0.05)
    assert total[decision.candidate.instance] <= bound * (1 + 1e-9)
    assert decision.cost_s.get(InstanceId("nobody")) is None


@settings(deadline=None, max_examples=examples(60))
@given(
    found=st.lists(CANDIDATES, min_size=1, max_size=6),
    source=st.lists(
        st.tuples(st.none() | st.integers(900, 10**5), st.lists(st.tuples(st.integers(0, 5), CANDIDATES), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    fewer=st.integers(0, 5),
)
def test_what_is_kept_of_the_last_decisions_decides_nothing(
    found: list[Candidate], source: list[tuple[int | None, list[tuple[int, Candidate]]]], fewer: int
) -> None:
    """Some candidates change between two requests, the others are the same objects."""
    kept = CostAware(COSTS)
    now = [each._replace(instance=InstanceId(f"i{number}")) for number, each in enumerate(found)]
    for tokens, changes in source:
        for place, other in changes:
            now[place % len(now)] = other._replace(instance=now[place % len(now)].instance)
        for candidates in (tuple(now), tuple(now[: fewer % len(now) + 1])):
            query = Query(prompt_tokens=tokens, gap=None, candidates=candidates)
            decision = kept.choose(query)
            assert decision == CostAware(COSTS).choose(query)
            assert decision.candidate.instance == on_paper(candidates, tokens)
            terms = decision.cost_s[decision.candidate.instance]
            assert decision.wait_s == (None if tokens is None else pytest.approx(predicted_wait_s(terms)))
