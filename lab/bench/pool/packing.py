"""How much of a pool holds KV when more requests wait than fit: blocks, and contiguous slots beside them.

An engine is followed step by step, in metadata alone. Each step computes 8,192 prompt tokens, in order of arrival, and
one token of each request whose prompt is done. A request is admitted when its prompt fits and the *watermark*, 1 % of
the pool, stays free for those that run; first come, first served, so a large one holds up the small ones behind it.
When a running request finds no block, the youngest is preempted and comes back first. Time is counted in steps.

The slots have the same memory and the same rules; each reserves its prompt and the longest answer of the trace, since
an answer's length isn't known and a slot can't grow.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_runtime.refusal import NoSpace
from lab.bench.pool.allocation import SPEC
from lab.bench.pool.lengths import Length, Workload
from lab.research.pool.block_manager import BlockManager
from lab.research.pool.pool import KVPool
from lab.research.pool.slot_layout import SlotLayout
from lab.research.pool.space import BlockSpec, SlotSpace

STEP_PROMPT_TOKENS = 8_192
WATERMARK = 0.01
_SAMPLE_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """The pool in tokens, the blocks' size, and the steps that are measured after as many to fill it."""

    capacity_tokens: int = 1 << 20
    block_tokens: int = 64
    steps: int = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Shares of the pool, means over time: in blocks (or reservations) of running requests, and in tokens that have a
    place there; of the former, what is lost inside, and the most that ever was; and how often a request was preempted.
    """

    utilisation: float
    token_utilisation: float
    internal: float
    internal_max: float
    external: float
    preemptions: int


@dataclass(slots=True)
class _Active:
    name: str
    length: Length
    prompt_left: int
    answered: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that have a place now."""
        return self.length.prompt + self.answered


class _Blocks:
    """Requests in blocks: the layout that is measured."""

    def __init__(self, plan: PackingPlan) -> None:
        spec = BlockSpec(
            kv_format=SPEC.kv_format,
            tokens=plan.block_tokens,
            size_bytes=SPEC.size_bytes // SPEC.tokens * plan.block_tokens,
        )
        blocks = plan.capacity_tokens // plan.block_tokens
        pool = KVPool(tier=CacheTier.HBM, space=SlotSpace(spec, blocks), policy=LruPolicy())
        self._manager = BlockManager(pool)
        self._spec = spec
        self._blocks = blocks
        self._watermark = int(WATERMARK * blocks)

    def begin(self, active: _Active) -> bool:
        tokens = active.tokens
        taken = round(self._manager.get_utilization().pinned_ratio * self._blocks)
        if -(-tokens // self._spec.tokens) > self._blocks - taken - self._watermark:
            return False
        return not isinstance(self._manager.allocate(active.name, tokens), NoSpace)

    def grow(self, active: _Active) -> bool:
        return not isinstance(self._manager.append(active.name), NoSpace)

    def end(self, active: _Active, *, written_tokens: int) -> None:
        self._manager.free(active.name, written_tokens=written_tokens)

    def used(self) -> float:
        return self._manager.get_utilization().pinned_ratio

    def lost(self) -> tuple[float, float]:
        found = self._manager.get_fragmentation()
        return found.internal_ratio, found.external_ratio


class _Slots:
    """Requests in contiguous slots: the baseline."""

    def __init__(self, plan: PackingPlan, longest_answer: int) -> None:
        self._layout = SlotLayout(plan.capacity_tokens)
        self._longest = longest_answer

    def begin(self, active: _Active) -> bool:
        reserve = active.length.prompt + self._longest
        return not isinstance(self._layout.allocate(active.name, active.tokens, reserve=reserve), NoSpace)

    def grow(self, active: _Active) -> bool:
        self._layout.append(active.name)
        return True

    def end(self, active: _Active, *, written_tokens: int) -> None:
        del written_tokens
        self._layout.free(active.name)

    def used(self) -> float:
        return self._layout.reserved_tokens / self._layout.capacity_tokens

    def lost(self) -> tuple[float, float]:
        found = self._layout.get_fragmentation()
        return found.internal_ratio, found.external_ratio


def pack_blocks(workload: Workload, plan: PackingPlan) -> Packing:
    """Follow an engine over blocks."""
    return _saturate(workload.endless(), plan, _Blocks(plan))


def pack_slots(workload: Workload, plan: PackingPlan) -> Packing:
    """Follow an engine over contiguous slots."""
    longest = max(length.answer for length in workload.requests)
    return _saturate(workload.endless(), plan, _Slots(plan, longest))


def last_block_loss(workload: Workload, block_tokens: int) -> float:
    """Return the share of all requests' blocks that is unfilled when they end, without any pool."""
    tokens = sum(sum(length) for length in workload.requests)
    taken = sum(-(-sum(length) // block_tokens) * block_tokens for length in workload.requests)
    return 1 - tokens / taken


def _saturate(lengths: Iterator[Length], plan: PackingPlan, layout: _Blocks | _Slots) -> Packing:
    engine = _Engine(lengths, layout)
    for _ in range(plan.steps):
        engine.step()
    used: list[float] = []
    tokens: list[float] = []
    lost: list[tuple[float, float]] = []
    for step in range(plan.steps):
        engine.step()
        used.append(layout.used())
        tokens.append(engine.held_tokens / plan.capacity_tokens)
        if step % _SAMPLE_EVERY == 0:
            lost.append(layout.lost())
    return Packing(
        utilisation=sum(used) / len(used),
        token_utilisation=sum(tokens) / len(tokens),
        internal=sum(internal for internal, _ in lost) / len(lost),
        internal_max=max(internal for internal, _ in lost),
        external=sum(external for _, external in lost) / len(lost),
        preemptions=engine.preemptions,
    )


class _Engine:
    """The step loop of the module's text, over one layout and more requests than fit."""

    def __init__(self, lengths: Iterator[Length], layout: _Blocks | _Slots) -> None:
        self.held_tokens = 0
        self.preemptions = 0
        self._lengths = lengths
        self._layout = layout
        self._waiting: deque[_Active] = deque()
        self._running: list[_Active] = []
        """In order of admission."""
        self._named = 0

    def step(self) -> None:
        self._admit()
        budget = STEP_PROMPT_TOKENS
        place = 0
        while place < len(self._running):
            active = self._running[place]
            if active.prompt_left:
                done = min(budget, active.prompt_left)
                active.prompt_left -= done
                budget -= done
            elif not self._answer(active):
                continue
            place += 1

    def _admit(self) -> None:
        while True:
            if not self._waiting:
                length = next(self._lengths)
                self._waiting.append(_Active(f"r{self._named}", length, length.prompt))
                self._named += 1
            if not self._layout.begin(self._waiting[0]):
                return
            active = self._waiting.popleft()
            self._running.append(active)
            self.held_tokens += active.tokens

    def _answer(self, active: _Active) -> bool:
        """Give a request one token more, at the cost of younger ones if need be; False if it runs no longer."""
        while not self._layout.grow(active):
            youngest = self._running.pop()
            self.preemptions += 1
            self.held_tokens -= youngest.tokens
            self._layout.end(youngest, written_tokens=0)
            youngest.prompt_left = youngest.tokens
            self._waiting.appendleft(youngest)
            if youngest is active:
                return False
        active.answered += 1
        self.held_tokens += 1
        if active.answered < active.length.answer:
            return True
        self.held_tokens -= active.tokens
        self._layout.end(active, written_tokens=active.tokens)
        self._running.remove(active)
        return False
