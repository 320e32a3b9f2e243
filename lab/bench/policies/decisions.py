"""What a policy's decision costs in a full cache: the time of ``select_victims``, for one victim and for many.

A cache of so many blocks is filled with prompts, and goes on serving while it is measured: before each decision a
request uses a prompt of 24 blocks again (popular and recent ones more often), holds it for a while, and another one
releases its own; then new blocks take the victims' places, of which some were given up before and are known again. For
one victim that is a cache that finds 96 % of its blocks, as coding agents do. So every part of a policy is at work, and
what it puts off until somebody asks falls into the time that is measured. Before that as many blocks are replaced as
the cache holds: a policy with queues has found its balance by then.

A decision's time is what passed on the clock. Where the kernel gave the core to somebody else before the decision was
made (its count of the thread's involuntary switches has grown), that says how busy the machine is, so the time is the
processor's time of this thread; how many those were is told, and what passed on the clock is there beside it. Cold
caches after such a switch are counted as they come, and so are interrupts after which the same thread goes on. What the
machine makes of steps that always take the same is measured beside it: after each decision, a loop. Garbage is
collected at Python's own thresholds, and pauses are in the times; an engine, which exempts what it has loaded
(``gc.freeze``) and no block, has the same.
"""

import random
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.eviction import EvictionPolicy, PolicyContext

_PROMPT_BLOCKS = 24
_KEY_BYTES = 16
_HELD_PROMPTS = 64
_REPLACED_AT_ONCE = 200
_RETURNING = 0.2
"""Share of new blocks whose contents were given up of late."""
_REMEMBERED = 10_000
_LOOP_US = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionTimes:
    """Of one policy at one size: so many decisions, ``victims`` blocks each; see the module's text for their times."""

    policy: str
    blocks: int
    victims: int
    decisions: int
    p50_us: float
    p99_us: float
    max_us: float
    clock_p99_us: float
    """Of what passed on the clock, whoever had the core."""
    interrupted: int
    """Decisions during which somebody else had it."""
    loop_p99_us: float
    """Of a loop that takes 5 µs where nothing comes between: the machine's own part in ``p99_us``, about."""


@dataclass(frozen=True, slots=True)
class Took:
    """One decision's time, in seconds."""

    clock_s: float
    processor_s: float
    interrupted: bool
    loop_s: float
    """What the loop took that was run after it."""

    @property
    def own_s(self) -> float:
        """What it took where nobody else had the core meanwhile."""
        return min(self.clock_s, self.processor_s) if self.interrupted else self.clock_s


class FullCache:
    """A policy in a cache that is full and in use."""

    def __init__(self, make: Callable[[int], EvictionPolicy], *, blocks: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._policy = make(blocks)
        self._loop_steps = _steps_of(_LOOP_US)
        self._blocks = blocks
        self._ids = count()
        self._contents = count()
        self._prompts: list[list[BlockId]] = []
        self._places: dict[BlockId, tuple[int, bytes]] = {}
        """Of each resident block: its prompt's place, and its key."""
        self._held: deque[int] = deque()
        self._gone: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._insert(blocks)
        for _ in range(blocks // _PROMPT_BLOCKS):
            self._policy.access(self._prompts[self._popular()])
        for _ in range(blocks // _REPLACED_AT_ONCE):
            self.decide(_REPLACED_AT_ONCE)

    def decide(self, victims: int) -> Took:
        """Choose so many victims, and return the time that took; then serve on."""
        self._serve()
        keys = self._keys(victims)
        context = PolicyContext(
            tier=CacheTier.HBM,
            wanted_blocks=victims,
            used_blocks=self._blocks,
            capacity_blocks=self._blocks,
            incoming=keys,
        )
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        processor_s = time.thread_time()
        started = time.perf_counter()
        decision = self._policy.select_victims(context)
        took = Took(
            clock_s=time.perf_counter() - started,
            processor_s=time.thread_time() - processor_s,
            interrupted=resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw != switches,
            loop_s=_loop_s(self._loop_steps),
        )
        if len(decision.victims) != victims:
            raise AssertionError(f"{self._policy.name} chose {len(decision.victims)} blocks of {victims}")
        for block in decision.victims:
            place, key = self._places.pop(block)
            self._prompts[place].remove(block)
            self._gone.append(key)
        self._insert(victims, keys)
        return took

    def _insert(self, blocks: int, keys: list[bytes] | None = None) -> None:
        if keys is None:
            keys = self._keys(blocks)
        for start in range(0, blocks, _PROMPT_BLOCKS):
            of_prompt = keys[start : start + _PROMPT_BLOCKS]
            path = [BlockId(next(self._ids)) for _ in of_prompt]
            self._policy.insert(path, of_prompt)
            for block, key in zip(path, of_prompt, strict=True):
                self._places[block] = (len(self._prompts), key)
            self._prompts.append(path)

    def _keys(self, blocks: int) -> list[bytes]:
        keys = []
        for _ in range(blocks):
            if self._gone and self._rng.random() < _RETURNING:
                keys.append(self._gone.popleft())
            else:
                keys.append(next(self._contents).to_bytes(_KEY_BYTES, "big"))
        return keys

    def _serve(self) -> None:
        place = self._popular()
        self._policy.hold(self._prompts[place])
        self._policy.access(self._prompts[place])
        self._held.append(place)
        if len(self._held) > _HELD_PROMPTS:
            self._policy.release(self._prompts[self._held.popleft()])

    def _popular(self) -> int:
        """Return a prompt's place: the first are used most, the newest, which are at the end, often too."""
        prompts = len(self._prompts)
        skewed = int(prompts * self._rng.random() ** 3)
        return skewed if self._rng.random() < 1 / 2 else prompts - 1 - skewed


def measure(
    make: Callable[[int], EvictionPolicy], *, blocks: int, decisions: int, many: int, many_decisions: int
) -> tuple[DecisionTimes, DecisionTimes]:
    """Return the times of decisions for one victim, and of others for ``many``."""
    cache = FullCache(make, blocks=blocks)
    ones = [cache.decide(1) for _ in range(decisions)]
    more = [cache.decide(many) for _ in range(many_decisions)]
    name = make(1).name
    return _times(name, blocks, 1, ones), _times(name, blocks, many, more)


def _steps_of(loop_us: float) -> int:
    """Return how many steps of ``_loop_s`` take so long when nothing comes between."""
    return max(1, round(1_000 * loop_us / 1e6 / min(_loop_s(1_000) for _ in range(200))))


def _loop_s(steps: int) -> float:
    """Return what so many steps took that touch no memory."""
    started = time.perf_counter()
    for _ in range(steps):
        pass
    return time.perf_counter() - started


def _times(policy: str, blocks: int, victims: int, took: list[Took]) -> DecisionTimes:
    own_us = sorted(each.own_s * 1e6 for each in took)
    clock_us = sorted(each.clock_s * 1e6 for each in took)
    return DecisionTimes(
        policy=policy,
        blocks=blocks,
        victims=victims,
        decisions=len(took),
        p50_us=own_us[len(took) // 2],
        p99_us=own_us[len(took) * 99 // 100],
        max_us=own_us[-1],
        clock_p99_us=clock_us[len(took) * 99 // 100],
        interrupted=sum(each.interrupted for each in took),
        loop_p99_us=sorted(each.loop_s * 1e6 for each in took)[len(took) * 99 // 100],
    )
