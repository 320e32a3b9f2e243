"""Adaptive chooses as a naive twin does that keeps plain lists, looks at all blocks and counts everything anew."""

import math
from dataclasses import dataclass, field
from random import Random

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import AdaptivePolicy, PolicyContext
from lab.bench.policies.adversaries import Workload
from lab.traces import Request

ENDLESS = 2.0**40
WEIGHTS = ((1.0, 1.7, 2.5), (1.0, 1.0, 1.0), (1.0, 2.5, 4.5), (1.0, ENDLESS, ENDLESS))
SAID = (1.7, 1.0, 2.5, math.inf)
LRU = 1
RISK = 0.009


@dataclass
class Lines:
    """What is there, with the times of their last uses, and the uses of that and of what has left."""

    ghosts: int
    at: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)

    def use(self, key: int, now: int) -> None:
        if key in self.gone:
            self.gone.remove(key)
        elif key not in self.at:
            self.uses[key] = 0
        self.at[key] = now
        self.uses[key] += 1

    def drop(self, key: int) -> None:
        del self.at[key]
        self.gone = [*self.gone, key][-self.ghosts :]

    def first(self, weights: tuple[float, ...], now: int) -> int:
        """The one whose age is largest, where what came again ages more slowly; of two as old, that with fewer uses."""

        def age(key: int) -> tuple[float, int]:
            line = sum(self.uses[key] >= least for least in (2, 4))
            return (now - self.at[key]) / weights[line], -line

        return max(self.at, key=age)


class Shadow:
    def __init__(self, weights: tuple[float, ...], capacity: int) -> None:
        self.weights = weights
        self.lines = Lines(4 * capacity)
        self.now = 0
        self.lead = 0
        self.won = self.squares = 0.0

    def find(self, prompt: list[int]) -> int:
        return next((place for place, key in enumerate(prompt) if key not in self.lines.at), len(prompt))

    def use(self, key: int, capacity: int) -> None:
        self.now += 1
        self.lines.ghosts = 4 * capacity
        while key not in self.lines.at and len(self.lines.at) >= capacity:
            self.lines.drop(self.lines.first(self.weights, self.now - 1))
        self.lines.use(key, self.now)


class NaiveAdaptive:
    """One block a prompt's place, found by its key; serves a prompt and says who went."""

    def __init__(self, capacity: int) -> None:
        self.most = capacity
        self.capacity = 0
        self.lines = Lines(4 * capacity)
        self.parents: dict[int, int | None] = {}
        self.lru: list[int] = []
        self.lost: set[int] = set()
        self.now = self.uses = self.hits = self.lru_hits = self.chosen = 0
        self.block_tokens = 1
        self.severity = 1.0
        self.baseline = 0.0
        self.shadows = [Shadow(weights, capacity) for weights in WEIGHTS]

    @property
    def behind(self) -> int:
        return sum(key not in self.lines.at and key not in self.lost for key in self.lru)

    def serve(self, request: Request) -> list[int]:
        prompt = request.block_ids.tolist()
        self.come(prompt, request.block_tokens, request.prompt_tokens)
        before = dict(zip(prompt, [None, *prompt[:-1]], strict=True))
        victims = []
        for key in reversed(prompt):
            if key in self.lines.at:
                self.now += 1
                self.lines.use(key, self.now)
            else:
                if len(self.lines.at) >= self.most:
                    victims.append(self.evict())
                self.now += 1
                self.lines.use(key, self.now)
                self.parents[key] = before[key]
                self.capacity = max(self.capacity, len(self.lines.at))
                self.lost.discard(key)
            self.lru = [*(each for each in self.lru if each != key), key]
            self.lost -= set(self.lru[: -self.capacity])
            self.lru = self.lru[-self.capacity :]
            self.count(key)
        return victims

    def come(self, prompt: list[int], block_tokens: int, prompt_tokens: int) -> None:
        self.block_tokens = max(self.block_tokens, block_tokens)
        self.lost = set()
        ours, lru = (
            next((place for place, key in enumerate(prompt) if key not in there), len(prompt))
            for there in (self.lines.at, self.lru)
        )
        self.hits += min(ours * block_tokens, prompt_tokens)
        self.lru_hits += min(lru * block_tokens, prompt_tokens)
        if lru > ours:
            self.lost = {key for key in prompt[ours:lru] if key not in self.lines.at}
            self.severity = max(self.severity, (lru - ours) / len(self.lost))
        found = [shadow.find(prompt) for shadow in self.shadows]
        self.baseline += found[0]
        for shadow, own in zip(self.shadows[1:], found[1:], strict=True):
            shadow.lead += own - found[0]

    def evict(self) -> int:
        self.capacity = len(self.lines.at)
        allowed = self.hits - self.lru_hits + RISK * self.lru_hits
        most = math.floor(allowed / (self.severity * self.block_tokens))
        weights = WEIGHTS[LRU]
        if self.chosen != LRU and self.behind + 1 <= most:
            weights = WEIGHTS[self.chosen] if self.behind < 0.8 * most else (1.0, 1.0, 4.0)
        victim = self.lines.first(weights, self.now)
        if weights != WEIGHTS[LRU] and any(self.parents[key] == victim for key in self.lines.at):
            victim = self.lines.first(WEIGHTS[LRU], self.now)
        self.lines.drop(victim)
        del self.parents[victim]
        return victim

    def count(self, key: int) -> None:
        for shadow in self.shadows:
            shadow.use(key, max(1, self.capacity))
        self.uses += 1
        if self.uses < max(64, self.capacity // 8):
            return
        self.uses = 0
        fade = 1 - 1 / 32
        for shadow in self.shadows:
            shadow.won = (shadow.won + shadow.lead) * fade
            shadow.squares = (shadow.squares + shadow.lead**2) * fade
            shadow.lead = 0
        present = self.shadows[self.chosen].won
        won = [
            shadow.won
            if place == self.chosen or shadow.won > 0.5 * math.sqrt(shadow.squares) + 0.01 * self.baseline
            else 0
            for place, shadow in enumerate(self.shadows)
        ]
        best = max(range(len(won)), key=lambda place: (won[place], -place))
        if won[best] <= 0:
            best = 0
        if not (present > 0 and won[best] <= 1.1 * present):
            self.chosen = best
        self.baseline *= fade


def victims(policy: AdaptivePolicy, resident: set[int], capacity: int, request: Request) -> list[int]:
    prompt = request.block_ids.tolist()
    policy.requested(prompt, block_tokens=request.block_tokens, prompt_tokens=request.prompt_tokens)
    gone: list[int] = []
    for key in reversed(prompt):
        path = (BlockId(key),)
        if key in resident:
            policy.access(path)
            continue
        if len(resident) >= capacity:
            context = PolicyContext(tier=CacheTier.HBM, wanted_blocks=1, used_blocks=capacity, capacity_blocks=capacity)
            gone += policy.select_victims(context).victims
            resident.discard(gone[-1])
        policy.insert(path, path)
        resident.add(key)
    return gone


@pytest.mark.parametrize(("capacity", "seed"), [(8, 1), (30, 2), (60, 3), (60, 4)])
def test_it_chooses_whom_its_naive_twin_chooses(capacity: int, seed: int) -> None:
    workload = Workload(Random(seed), capacity)  # noqa: S311 - reproducible, not secret
    policy, twin, resident = AdaptivePolicy(capacity), NaiveAdaptive(capacity), set[int]()
    weights, reasons, chosen = set[float](), set[str](), 0
    for request in workload.requests(250):
        gone = victims(policy, resident, capacity, request)
        assert gone == twin.serve(request)
        state = policy.state()
        assert (state.hits, state.lru_hits, state.behind_blocks) == (twin.hits, twin.lru_hits, twin.behind)
        assert state.weight == SAID[twin.chosen]
        weights.add(state.follows)
        reasons.add(policy.reason)
        chosen += len(gone)
    assert chosen > 100
    assert capacity < 30 or len(weights) > 1, "it left LRU's order somewhere"
    assert capacity < 60 or any("used 4 times" in reason for reason in reasons), "it was sparing somewhere"
