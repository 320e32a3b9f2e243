"""The adaptive policy keeps its promise towards LRU on everything, and gains where something can be gained."""

import random
from collections.abc import Iterator, Sequence

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import AdaptivePolicy, LruPolicy, PolicyContext
from kvcontrol.kv_policy.adaptive import RISK
from kvcontrol.kv_policy.ghost_lru import EXACT_BLOCKS, sampled, sampling_shift
from kvcontrol.kv_policy.three_lines import ENDLESS, LRU, ThreeLines, Weights

ROOM = 64


class Cache:
    """A cache of single blocks; a block's id is its content."""

    def __init__(self, policy: AdaptivePolicy | LruPolicy, capacity: int = ROOM) -> None:
        self.policy, self.capacity = policy, capacity
        self.resident: set[int] = set()
        self.hits = 0

    def use(self, block: int) -> None:
        path = (BlockId(block),)
        if block in self.resident:
            self.hits += 1
            self.policy.access(path)
            return
        if len(self.resident) >= self.capacity:
            context = PolicyContext(
                tier=CacheTier.HBM,
                wanted_blocks=1,
                used_blocks=self.capacity,
                capacity_blocks=self.capacity,
                incoming=path,
            )
            self.resident.difference_update(self.policy.select_victims(context).victims)
        self.policy.insert(path, path)
        self.resident.add(block)


def scan_and_popular(rng: random.Random, uses: int) -> Iterator[int]:
    """What comes once, and things that come again, more of them than there is room for."""
    for place in range(uses):
        yield rng.randrange(40) if rng.random() < 0.3 else 1_000 + place


def loops(rng: random.Random, uses: int) -> Iterator[int]:
    """Round after round over a little more than there is room for."""
    del rng
    for place in range(uses):
        yield place % (ROOM + 8)


def once_again(rng: random.Random, uses: int) -> Iterator[int]:
    """Everything comes exactly twice, soon: what came again is worth nothing."""
    recent: list[int] = []
    for place in range(uses // 2):
        yield place
        recent.append(place)
        if len(recent) > ROOM // 2:
            yield recent.pop(rng.randrange(8))


def again_late(rng: random.Random, uses: int) -> Iterator[int]:
    """Everything comes exactly twice, the second time when LRU is about to let it go."""
    del rng
    for place in range(uses // 2):
        yield place
        yield max(0, place - (ROOM // 2 - 2))


def changing(rng: random.Random, uses: int) -> Iterator[int]:
    """One habit after another; what was popular never comes again."""
    for phase in range(6):
        kind = (scan_and_popular, once_again, loops)[phase % 3]
        yield from (phase * 1_000_000 + block for block in kind(rng, uses // 6))


def bursts(rng: random.Random, uses: int) -> Iterator[int]:
    """Prompts of many blocks, most used once, some again after any time."""
    prompts: list[list[int]] = []
    done = 0
    while done < uses:
        if prompts and rng.random() < 0.4:
            prompt = rng.choice(prompts[-40:])
        else:
            prompt = list(range(done, done + rng.randrange(1, 30)))
            prompts.append(prompt)
        yield from reversed(prompt)
        done += len(prompt)


@pytest.mark.parametrize("workload", [scan_and_popular, loops, once_again, changing, bursts])
@pytest.mark.parametrize("capacity", [16, ROOM, 200])
@pytest.mark.parametrize("seed", range(3))
def test_it_never_falls_behind_lru_by_more_than_its_risk_at_any_moment(
    workload: object, capacity: int, seed: int
) -> None:
    assert callable(workload)
    lru, ours = Cache(LruPolicy(), capacity), Cache(AdaptivePolicy(capacity), capacity)
    for block in workload(random.Random(seed), 12_000):  # noqa: S311 - reproducible, not secret
        lru.use(block)
        ours.use(block)
        assert ours.hits >= (1 - RISK) * lru.hits - 1
    state = ours.policy.state()  # type: ignore[union-attr]
    assert (state.hits, state.lru_hits) == (ours.hits, lru.hits), "its ghost is not LRU"
    assert state.behind_blocks == len(set(lru.resident) - ours.resident)


def test_it_keeps_what_comes_again_when_scans_would_wash_it_out() -> None:
    lru, ours = Cache(LruPolicy()), Cache(AdaptivePolicy(ROOM))
    for block in scan_and_popular(random.Random(1), 40_000):  # noqa: S311
        lru.use(block)
        ours.use(block)
    assert ours.hits > 1.2 * lru.hits
    assert ours.policy.state().follows > 1  # type: ignore[union-attr]


def test_it_goes_back_to_lru_where_that_is_better() -> None:
    ours = Cache(AdaptivePolicy(ROOM))
    for block in again_late(random.Random(1), 40_000):  # noqa: S311
        ours.use(block)
    state = ours.policy.state()  # type: ignore[union-attr]
    assert (state.weight, state.behind_blocks) == (1, 0)


def test_it_says_what_it_follows() -> None:
    policy = AdaptivePolicy(4)
    policy.insert([BlockId(1)])
    context = PolicyContext(tier=CacheTier.HBM, wanted_blocks=1, used_blocks=1, capacity_blocks=4)
    assert policy.select_victims(context).reason == (
        "adaptive: used longest ago, until a weight of 1.7 can't cost more than it has gained"
    )
    policy.requested(["a"], block_tokens=10, prompt_tokens=10)
    for _ in range(200):
        policy.insert([BlockId(1)], ["a"])
        for _ in range(6):
            policy.access([BlockId(1)])
            policy.requested(["a"], block_tokens=10, prompt_tokens=10)
        policy.remove([BlockId(1)])
    policy.insert([BlockId(1)], ["a"])
    assert policy.select_victims(context).reason == "adaptive: oldest, where what came again ages 1.7 times as slowly"


def test_a_block_lost_for_another_reason_is_lost_to_lru_too() -> None:
    ours = Cache(AdaptivePolicy(8), 8)
    for block in range(8):
        ours.use(block)
    ours.policy.remove([BlockId(3)])
    ours.resident.remove(3)
    for block in range(8):
        ours.use(block)
    state = ours.policy.state()  # type: ignore[union-attr]
    assert (state.hits, state.lru_hits, state.behind_blocks) == (7, 7, 0)


def test_two_blocks_of_one_content_are_one_to_the_guard() -> None:
    policy = AdaptivePolicy(8)
    policy.insert([BlockId(1)], ["same"])
    policy.insert([BlockId(2)], ["same"])
    assert policy.state().behind_blocks == 0
    context = PolicyContext(tier=CacheTier.HBM, wanted_blocks=2, used_blocks=2, capacity_blocks=8)
    assert len(policy.select_victims(context).victims) == 2
    assert policy.state().behind_blocks == 1


def test_a_held_block_stays_and_is_used_all_the_same() -> None:
    ours = Cache(AdaptivePolicy(8), 8)
    ours.use(0)
    ours.policy.hold([BlockId(0)])
    for block in range(1, 40):
        ours.use(block)
    ours.use(0)
    assert 0 in ours.resident
    ours.policy.release([BlockId(0)])
    for block in range(100, 140):
        ours.use(block)
    assert 0 not in ours.resident


def test_a_weight_of_one_is_lru_and_infinity_lets_what_was_used_once_go_first() -> None:
    uses = {1: 2, 4: 4, 3: 1, 2: 3, 5: 1, 6: 1, 7: 4}

    def order(weights: Weights) -> Sequence[int | None]:
        lines: ThreeLines[int] = ThreeLines()
        for key, often in uses.items():
            lines.put(key, often)
        gone = []
        while (key := lines.first(weights)) is not None:
            gone.append(key)
            lines.drop(key, uses[key])
        return gone

    assert order(LRU) == [1, 4, 3, 2, 5, 6, 7]
    assert order(Weights(1, ENDLESS, ENDLESS)) == [3, 5, 6, 1, 4, 2, 7]
    assert order(Weights(1, 1.2, 4)) == [1, 3, 2, 5, 4, 6, 7]


def test_a_sample_has_its_share_of_the_keys_and_always_the_same() -> None:
    assert sampling_shift(EXACT_BLOCKS, EXACT_BLOCKS) == 0
    assert sampling_shift(EXACT_BLOCKS + 1, EXACT_BLOCKS) == 1
    chosen = [key for key in range(80_000) if sampled(key, 3)]
    assert 9_000 < len(chosen) < 11_000
    assert all(sampled(key, 3) for key in chosen)
    assert all(sampled(key, 0) for key in range(10))
