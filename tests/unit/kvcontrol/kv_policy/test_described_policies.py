"""Predictive, QoS and cost-aware choose as naive twins do that look at all blocks; and what they are for comes true."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol, cast

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import BlockKey, EvictionPolicy, PolicyContext, PolicyError, make_policy
from kvcontrol.kv_policy.predictive import CLASSES, class_of
from kvcontrol.kv_policy.reuse_table import ReuseTable, bucket_of
from lab.research.fairness import jain_index

CAPACITY = 60


class Twin(Protocol):
    def get(self, key: BlockKey) -> int | None:
        """Return the content that goes for a newcomer, None when nothing goes."""


def workload(*, seed: int, accesses: int = 6_000) -> list[BlockKey]:
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    keys = []
    for _ in range(accesses):
        content = int(300 * rng.random() ** 2)
        tenant = content % 5
        keys.append(
            BlockKey(
                content,
                tenant=f"tenant-{tenant}",
                priority=2 if content % 11 == 0 else 0,
                recompute_s=0.01 * (1 + content % 7),
                reload_s=0.02 if content % 3 == 0 else None,
            )
        )
    return keys


def context(key: BlockKey, *, wanted: int = 1) -> PolicyContext:
    return PolicyContext(
        tier=CacheTier.HBM, wanted_blocks=wanted, used_blocks=CAPACITY, capacity_blocks=CAPACITY, incoming=(key,)
    )


def victims(policy: EvictionPolicy, keys: Iterable[BlockKey]) -> list[int | None]:
    resident: set[int] = set()
    gone: list[int | None] = []
    for key in keys:
        block = BlockId(key.content)  # type: ignore[arg-type]
        if block in resident:
            policy.access((block,))
            gone.append(None)
            continue
        victim = None
        if len(resident) == CAPACITY:
            (victim,) = policy.select_victims(context(key)).victims
            resident.remove(victim)
        policy.insert((block,), (key,))
        resident.add(block)
        gone.append(victim)
    return gone


@dataclass(slots=True)
class Known:
    key: BlockKey
    last: int
    uses: int = 1
    worth: float = 0


class NaivePredictive:
    """Scans all blocks: of each class the oldest, of those the least expected; ghosts are a list."""

    def __init__(self) -> None:
        self.ticks = count(1)
        self.table = ReuseTable(CLASSES, patience=3 * CAPACITY, window=16 * CAPACITY)
        self.known: dict[int, Known] = {}
        self.ghosts: list[tuple[int, int, int]] = []

    def get(self, key: BlockKey) -> int | None:
        content: int = key.content  # type: ignore[assignment]
        if content in self.known:
            now = next(self.ticks)
            block = self.known[content]
            self.table.used(class_of(block.uses), block.last, now)
            block.uses += 1
            block.last = now
            self.table.begun(class_of(block.uses), now)
            return None
        victim = self.evict() if len(self.known) == CAPACITY else None
        now = next(self.ticks)
        block = self.known[content] = Known(key, now)
        for ghost in self.ghosts:
            if ghost[0] == content:
                self.ghosts.remove(ghost)
                self.table.used(class_of(ghost[1]), ghost[2], now)
                block.uses = ghost[1] + 1
                break
        self.table.begun(class_of(block.uses), now)
        return victim

    def evict(self) -> int:
        now = max(block.last for block in self.known.values())
        fronts: dict[int, int] = {}
        for content, block in sorted(self.known.items(), key=lambda item: item[1].last):
            fronts.setdefault(class_of(block.uses), content)
        klass = min(sorted(fronts), key=lambda k: self.table.worth(k, bucket_of(now - self.known[fronts[k]].last)))
        content = fronts[klass]
        block = self.known.pop(content)
        self.ghosts.append((content, block.uses, block.last))
        if len(self.ghosts) > 4 * CAPACITY:
            _, uses, last = self.ghosts.pop(0)
            self.table.ended(class_of(uses), last, now)
        return content


class NaiveQos:
    """Adds every tenant's weight up anew for every victim."""

    def __init__(self) -> None:
        self.ticks = count(1)
        self.known: dict[int, Known] = {}
        self.heard: dict[str, int] = {}

    def get(self, key: BlockKey) -> int | None:
        content: int = key.content  # type: ignore[assignment]
        victim = None
        if content not in self.known and len(self.known) == CAPACITY:
            victim = self.evict()
            del self.known[victim]
        now = next(self.ticks)
        self.known[content] = Known(self.known[content].key if content in self.known else key, now)
        self.heard[self.known[content].key.tenant] = now
        return victim

    def evict(self) -> int:
        weights: dict[str, float] = {}
        for block in self.known.values():
            weights[block.key.tenant] = weights.get(block.key.tenant, 0) + 2.0**-block.key.priority
        now = max(self.heard.values())
        longest = min(weights, key=lambda tenant: self.heard[tenant])
        giver = longest
        if now - self.heard[longest] <= 4 * CAPACITY:
            giver = min(weights, key=lambda tenant: (-weights[tenant], tenant))
        own = [content for content, block in self.known.items() if block.key.tenant == giver]
        return min(own, key=lambda content: (self.known[content].key.priority, self.known[content].last))


class NaiveCostAware:
    """Scans all blocks for the least worth."""

    def __init__(self) -> None:
        self.ticks = count(1)
        self.known: dict[int, Known] = {}
        self.climbed = 0.0
        self.mean_s: float | None = None

    def get(self, key: BlockKey) -> int | None:
        content: int = key.content  # type: ignore[assignment]
        victim = None
        if content in self.known:
            block = self.known[content]
            block.uses = min(16, block.uses + 1)
        else:
            if len(self.known) == CAPACITY:
                victim = min(self.known, key=lambda each: (self.known[each].worth, self.known[each].last))
                self.climbed = max(self.climbed, self.known.pop(victim).worth)
            cost_s = min(seconds for seconds in (key.recompute_s, key.reload_s) if seconds is not None)
            self.mean_s = cost_s if self.mean_s is None else self.mean_s + 0.001 * (cost_s - self.mean_s)
            block = self.known[content] = Known(key, 0)
        block.last = next(self.ticks)
        cost_s = min(seconds for seconds in (block.key.recompute_s, block.key.reload_s) if seconds is not None)
        assert self.mean_s is not None
        block.worth = self.climbed + block.uses * min(1024, max(1, round(64 * cost_s / self.mean_s)))
        return victim


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "twin"), [("predictive", NaivePredictive), ("qos", NaiveQos), ("cost_aware", NaiveCostAware)]
)
def test_a_naive_twin_chooses_the_same_victims(name: str, twin: type[Twin], seed: int) -> None:
    keys = workload(seed=seed)
    naive = twin()
    expected = [naive.get(key) for key in keys]
    assert victims(make_policy(name, capacity_blocks=CAPACITY), keys) == expected
    assert len(set(expected)) > 100


def test_tenants_that_want_more_than_there_is_end_up_with_equal_shares_however_hard_they_push() -> None:
    rng = random.Random(4)  # noqa: S311 - reproducible, not secret
    policy, resident, owner = make_policy("qos", capacity_blocks=CAPACITY), set(), {}
    for number in range(3_000):
        tenant = "loud" if rng.random() < 0.9 else rng.choice(["quiet", "shy"])
        if len(resident) == CAPACITY:
            resident -= set(policy.select_victims(context(BlockKey(number))).victims)
        policy.insert((BlockId(number),), (BlockKey(number, tenant=tenant),))
        resident.add(number)
        owner[number] = tenant
    shares = [sum(owner[block] == tenant for block in resident) for tenant in ("loud", "quiet", "shy")]
    assert jain_index(shares) > 0.99


def test_a_priority_more_is_twice_the_blocks() -> None:
    policy, resident = make_policy("qos", capacity_blocks=CAPACITY), set()
    for number in range(1_000):
        if len(resident) == CAPACITY:
            resident -= set(policy.select_victims(context(BlockKey(number))).victims)
        key = BlockKey(number, tenant="ab"[number % 2], priority=number % 2)
        policy.insert((BlockId(number),), (key,))
        resident.add(number)
    assert sum(block % 2 for block in resident) == pytest.approx(CAPACITY * 2 / 3, abs=1)


def test_a_tenant_that_left_keeps_no_share() -> None:
    policy = make_policy("qos", capacity_blocks=4, parameters={"idle": 1})
    policy.insert((BlockId(0),), (BlockKey(0, tenant="gone"),))
    policy.insert((BlockId(1), BlockId(2), BlockId(3)), [BlockKey(each, tenant="here") for each in (1, 2, 3)])
    for _ in range(3):
        policy.access((BlockId(1), BlockId(2), BlockId(3)))
    assert policy.select_victims(context(BlockKey(9))).victims == (0,)


def test_what_is_cheap_to_get_back_goes_before_what_is_dear() -> None:
    policy = make_policy("cost_aware", capacity_blocks=4)
    policy.insert((BlockId(1),), (BlockKey(1, recompute_s=5.0),))
    policy.insert((BlockId(2),), (BlockKey(2, recompute_s=5.0, reload_s=0.1),))
    policy.insert((BlockId(3),), (BlockKey(3, recompute_s=1.0),))
    assert policy.select_victims(context(BlockKey(9), wanted=3)).victims == (2, 3, 1)


def test_a_head_is_worth_what_its_tails_are() -> None:
    policy = make_policy("cost_aware", capacity_blocks=4)
    policy.insert((BlockId(1), BlockId(2)), (BlockKey(1, recompute_s=1.0), BlockKey(2, recompute_s=9.0)))
    assert policy.select_victims(context(BlockKey(9), wanted=2)).victims == (2, 1)


def test_predictive_keeps_what_returns_and_gives_up_a_scan() -> None:
    policy, resident = make_policy("predictive", capacity_blocks=CAPACITY), set()
    hits = {True: 0, False: 0}
    strangers = count(1_000)
    for number in range(20_000):
        returning = number % 3 == 0
        block = BlockId(number // 3 % 50 if returning else next(strangers))
        if block in resident:
            hits[returning] += number > 10_000
            policy.access((block,))
            continue
        if len(resident) == CAPACITY:
            resident -= set(policy.select_victims(context(BlockKey(block))).victims)
        policy.insert((block,), (block,))
        resident.add(block)
    assert hits[True] > 0.95 * 10_000 / 3  # LRU finds none of them: 150 uses lie between two of a block's


def test_a_described_key_is_the_bare_one() -> None:
    assert BlockKey("content", tenant="a", priority=1) == "content"
    assert {"content": 1}[BlockKey("content")] == 1  # type: ignore[index]
    assert BlockKey("content", tenant="a") == BlockKey("content", tenant="b")
    assert BlockKey("content") != BlockKey("other")


def test_a_description_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="priority 8; allowed is 0 to 7"):
        BlockKey("content", priority=8)
    for priority in (1.5, float("nan"), True, "1"):
        with pytest.raises(PolicyError, match=r"priority .*; allowed is 0 to 7, a whole number"):
            BlockKey("content", priority=cast("int", priority))
    for seconds in (float("nan"), float("inf"), -1, "1", True, 10**400):
        with pytest.raises(PolicyError, match=r"reload_s is .*; it must be >= 0 and finite"):
            BlockKey("content", reload_s=cast("float", seconds))
    with pytest.raises(PolicyError, match=r"tenant is \['a'\]; allowed is a text"):
        BlockKey("content", tenant=cast("str", ["a"]))


def test_costs_that_are_further_apart_than_numbers_can_say_are_compared_all_the_same() -> None:
    policy = make_policy("cost_aware", capacity_blocks=8)
    for block, cost_s in enumerate((1e-310, 1e308, 1e-310, 0.0)):
        policy.insert((BlockId(block),), (BlockKey(block, recompute_s=cost_s),))
    assert policy.select_victims(context(BlockKey(9), wanted=9)).victims[-1] == 1


def test_jains_index() -> None:
    assert jain_index([3, 3, 3]) == 1
    assert jain_index([1, 0, 0, 0]) == 0.25
    assert jain_index([]) == jain_index([0, 0]) == 1
    for wrong in (-1, float("nan"), float("inf"), 10**400):
        with pytest.raises(PolicyError, match=r"a share is .*; it must be >= 0 and finite"):
            jain_index([1, wrong])
