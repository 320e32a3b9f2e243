"""One simulated engine: continuous batching with chunked prefill over real blocks, on a clock that somebody else has.

Nothing here sleeps or looks at a clock. Whoever drives it says what time it is, gives it requests, and asks when
something will happen next:

    engine.submit(request, now_s)      engine.advance(now_s)      engine.next_event_s

Between two events the engine does one piece of work: a prefill step, a *span* of decode steps, or it waits for a load.
A span is as many steps as nothing interrupts: until a sequence ends, needs a block, or a load is over; a request
that comes meanwhile cuts it at the end of the step that runs. So an answer of a thousand tokens is a few events, and
with ``stream`` every step is one, and tells the listener.

As LMDeploy's PyTorch engine, which it stands for, does: what waits is admitted in order (``waiting.py``) as long as
there are places in the batch and blocks for all of its prompt; a prefill step takes several prompts, up to
``max_prefill_tokens``, or so much of one that is longer, and short ones pass long ones (``turns.py``); between two
steps, those that are answering make one. A prompt's last token is always computed. Blocks are cached from the step on
that fills them; blocks that decoding fills, when the sequence next needs room. A sequence that needs a block when there
is none makes way for the others: the one that came last goes back to the head of the line and computes anew what it
doesn't find in the cache.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Final

from engines.sim.batch import DecodeBatch
from engines.sim.behaviour import Behaviour, Pace
from engines.sim.counters import Counters
from engines.sim.decoding import Decoder, Span
from engines.sim.pool import PrefixPool
from engines.sim.prefill_order import PrefillOrder
from engines.sim.profile import Profile
from engines.sim.room import need_room
from engines.sim.sequence import Listener, Phase, SimRequest, SimSequence
from engines.sim.sequence_blocks import SequenceBlocks
from engines.sim.sink import BlockSink, SilentSink
from engines.sim.tiers import MakePolicy, SimTiers
from engines.sim.waiting import SimWaiting
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy import EvictionPolicy, make_policy

_NEVER: Final = math.inf


@dataclass(slots=True)
class _Prefill:
    end_s: float
    seconds: float
    chunks: list[tuple[SimSequence, int]]


@dataclass(slots=True)
class _Wait:
    end_s: float


class SimEngine:
    """See the module's text. ``close`` it at the end."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        profile: Profile,
        *,
        listener: Listener,
        sink: BlockSink | None = None,
        behaviour: Behaviour | None = None,
        stream: bool = False,
        make: MakePolicy | None = None,
    ) -> None:
        shape, behaviour = profile.engine, behaviour or Behaviour()
        sink, make = sink or SilentSink(), make or _shipped
        self.profile = profile
        self.counters = Counters()
        self.pool = PrefixPool(
            capacity_blocks=shape.hbm_blocks,
            block_tokens=shape.block_tokens,
            policy=make(shape.policy, shape.hbm_blocks),
            sink=sink,
        )
        self.tiers: SimTiers | None = None
        if shape.ddr_blocks:
            self.tiers = SimTiers(
                shape,
                profile.links,
                sink=sink,
                make_policy=make,
                rng=random.Random(f"{behaviour.seed} tiers"),  # noqa: S311
                corrupt_share=behaviour.corrupt_share,
            )
        self.blocks = SequenceBlocks(shape.block_tokens, self.pool, self.tiers)
        self._shape, self._time = shape, profile.time
        self._pace = Pace(behaviour)
        self._listener = listener
        self._number = 0
        self.now_s = 0.0
        self.queue = SimWaiting(shape.block_tokens)
        self._loading: list[tuple[float, int, SimSequence]] = []
        self._prefilling: deque[SimSequence] = deque()
        self._running = DecodeBatch(shape.block_tokens)
        self._decoder = Decoder(self._running, profile.time, self.counters, stream=stream)
        self.gaps = self._decoder.gaps
        """Pauses between the tokens of answers."""
        self._leaving: list[SimSequence] = []
        self._work: _Prefill | Span | _Wait | None = None
        self._decode_next = False
        self._prefill_order = PrefillOrder(shape.max_prefill_tokens)

    # What somebody who drives it calls.

    @property
    def next_event_s(self) -> float:
        """When ``advance`` would do something; infinite while there is nothing to do."""
        return _NEVER if self._work is None else self._work.end_s

    @property
    def running(self) -> int:
        """Sequences that have a place in the batch."""
        return len(self._running) + len(self._prefilling) + len(self._loading)

    @property
    def waiting(self) -> int:
        """Sequences that have none."""
        return len(self.queue)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._work is None

    def submit(self, request: SimRequest, now_s: float) -> SimSequence:
        """Take a request; raises ``DoesNotFitError``, and takes nothing then."""
        need_room(self._shape, request.prompt_tokens, request.output_tokens)
        self.advance(now_s)
        self._number += 1
        self.counters.requests += 1
        sequence = SimSequence(request=request, number=self._number, arrived_s=now_s, target=request.prompt_tokens)
        self.queue.came(sequence)
        if self._work is None or isinstance(self._work, _Wait):
            self._work = None
            self._begin(now_s)
        elif (running := self.running) < self._shape.max_batch and self.queue.first(now_s, running) is sequence:
            self._decoder.cut(self._work, now_s)
        return sequence

    def cancel(self, sequence: SimSequence, now_s: float) -> None:
        """Forget a request at once; one that has ended stays ended."""
        self.advance(now_s)
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.WAITING:
            self.queue.left(sequence)
        elif sequence.phase is Phase.PREFILLING:
            self._prefilling.remove(sequence)
            if isinstance(self._work, _Prefill):  # its chunk is computed all the same, for nobody
                self._work.chunks = [each for each in self._work.chunks if each[0] is not sequence]
        elif sequence.phase is Phase.LOADING:
            self._loading = [each for each in self._loading if each[2] is not sequence]
            heapq.heapify(self._loading)
        else:
            self._leaving.append(sequence)  # with the end of the step that runs
            self._decoder.cut(self._work, now_s)
            return
        sequence.phase = Phase.ENDED
        self.blocks.let_go(sequence)
        self.counters.cancelled += 1
        if isinstance(self._work, _Wait):
            self._work = None
            self._begin(now_s)

    def advance(self, now_s: float) -> None:
        """Do all that happens until ``now_s``, that moment included."""
        work = self._work
        while work is not None and work.end_s <= now_s:
            end_s = work.end_s
            self.now_s = end_s
            self._work = None
            match work:
                case _Prefill():
                    self._prefilled(work)
                case Span():
                    for sequence in self._decoder.ended(work, self._listener):
                        self._end(sequence, end_s)
            self._begin(end_s)
            work = self._work
        self.now_s = max(self.now_s, now_s)
        if self.tiers is not None and work is None:
            self.tiers.work(now_s)

    def close(self) -> None:
        """Let go of the tiers."""
        if self.tiers is not None:
            self.tiers.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(blocks)."""
        self.pool.check_integrity()
        placed = [*self._running.sequences, *self._prefilling, *(each for _, _, each in self._loading)]
        own = [slot for each in placed for slot in each.own]
        must(len(set(own)) == len(own), "two sequences have one slot")
        must(
            self.pool.used_blocks == len(self.pool.cached) + len(own),
            f"{self.pool.used_blocks} slots are used: {len(self.pool.cached)} cached, {len(own)} of sequences",
        )
        self.queue.check_integrity()
        must(self.running <= self._shape.max_batch, "more run than the batch has places")
        if self.tiers is not None:
            self.tiers.hierarchy.check_integrity()

    # What happens next.

    def _begin(self, now_s: float) -> None:
        """Choose the next piece of work."""
        if self._leaving:
            self._dismiss()
        while self._loading and self._loading[0][0] <= now_s:
            sequence = heapq.heappop(self._loading)[2]
            sequence.phase = Phase.PREFILLING
            self._prefilling.append(sequence)
        if self.queue:
            self._admit(now_s)
        if self._prefilling and not (self._decode_next and self._running):
            self._work = self._prefill(now_s)
        elif self._running and self._grow(now_s):
            self._work = self._decode(now_s)
        elif self._prefilling:  # everybody else has made way
            self._work = self._prefill(now_s)
        elif self.queue and not self._loading:
            self._admit(now_s)
            self._work = self._prefill(now_s) if self._prefilling else None
        if self._work is None and self._loading:
            self._work = _Wait(self._loading[0][0])

    def _dismiss(self) -> None:
        """Let those go that nobody wants any more."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.phase is Phase.RUNNING:
                self._decoder.leave(sequence)
            elif sequence.phase is Phase.WAITING:  # it was preempted meanwhile
                self.queue.left(sequence)
            else:
                continue
            sequence.phase = Phase.ENDED
            self.blocks.let_go(sequence)
            self.counters.cancelled += 1

    def _admit(self, now_s: float) -> None:
        """Give those that wait a place and blocks, in their order."""
        shape, pool, tiers = self._shape, self.pool, self.tiers
        size = shape.block_tokens
        while self.queue and (running := self.running) < shape.max_batch:
            sequence = self.queue.first(now_s, running)
            request = sequence.request
            chain = request.chain
            limit = min((sequence.target - 1) // size, len(chain.keys))
            total = -(-sequence.target // size)
            hit = pool.cached.leading(chain.keys, limit)
            keys = chain.keys
            head = keys[:hit]
            if total - hit > pool.available_blocks:
                return
            pool.keep(head)  # before anything is evicted for the rest; without room it is let go again
            if total - hit > pool.available_blocks:
                pool.release(head)
                return
            pool.requested(keys[:limit], block_tokens=size, prompt_tokens=sequence.target)
            pool.use(head)
            pool.release(head)  # one of its two holds
            slots = pool.take(total - hit, keys[hit:limit])
            if slots is None:
                raise AssertionError(f"{total - hit} blocks can't be had of {pool.available_blocks} available ones")
            plan = None if tiers is None else tiers.plan_load(chain, hit, limit, now_s)
            self.queue.started(sequence, now_s)
            if self.blocks.shadows is not None:
                self.blocks.shadows.requested(keys[:limit])
            sequence.attached, sequence.own = hit, slots
            sequence.computed = hit * size
            found = {CacheTier.HBM: hit * size} if hit else {}
            ready_s = now_s
            if plan is not None and tiers is not None:
                loaded = tiers.load(plan, slots[: len(plan.block_ids)], now_s)
                if loaded.blocks:
                    last = hit + loaded.blocks
                    self.blocks.attach(sequence, last)
                    sequence.computed = last * size
                    found |= {tier: blocks * size for tier, blocks in loaded.by_tier.items()}
                ready_s = loaded.ready_s
            if not sequence.preempted:
                sequence.cached_tokens, sequence.cached_by_tier = sequence.computed, found
                self.counters.query_tokens += request.prompt_tokens
                self.counters.hit_tokens += hit * size
            if ready_s > now_s:
                sequence.phase = Phase.LOADING
                heapq.heappush(self._loading, (ready_s, sequence.number, sequence))
            else:
                sequence.phase = Phase.PREFILLING
                self._prefilling.append(sequence)

    def _prefill(self, now_s: float) -> _Prefill:
        """Begin a step that computes prompts, or a part of one."""
        chunks = self._prefill_order.take(self._prefilling)
        seconds = self._time.step_s
        for sequence, tokens in chunks:
            seconds += self._time.chunk_s(tokens, sequence.computed)
            self.blocks.attach(sequence, (sequence.computed + tokens) // self._shape.block_tokens)
        seconds *= self._pace()
        self._decode_next = True
        return _Prefill(end_s=now_s + seconds, seconds=seconds, chunks=chunks)

    def _prefilled(self, work: _Prefill) -> None:
        """A prefill step is over: prompts that are complete have their first token."""
        now_s, counters = work.end_s, self.counters
        counters.busy_s += work.seconds
        counters.steps += 1
        computed = 0
        for sequence, tokens in work.chunks:
            sequence.computed += tokens
            computed += tokens
            if sequence.computed < sequence.target:
                continue
            self._prefilling.remove(sequence)
            self.blocks.save(sequence, now_s, tail=False)
            sequence.generated += 1
            counters.generated_tokens += 1
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
            else:
                self._decoder.resumed(sequence, now_s)
            self._listener.produced(sequence, 1, now_s)
            if sequence.generated >= sequence.request.output_tokens:
                self._end(sequence, now_s)
            else:
                self._decoder.join(sequence, now_s)
        counters.computed_tokens += computed
        if self.tiers is not None:
            self.tiers.computed(computed, work.seconds)

    def _decode(self, now_s: float) -> Span:
        """Begin as many decode steps as nothing interrupts."""
        self._decode_next = False
        until_s = self._loading[0][0] if self._loading else _NEVER
        return self._decoder.begin(now_s, pace=self._pace(), until_s=until_s, single=bool(self._prefilling))

    def _end(self, sequence: SimSequence, now_s: float) -> None:
        sequence.phase = Phase.ENDED
        sequence.ended_s = now_s
        self.counters.ended += 1
        self.blocks.save(sequence, now_s, tail=True)
        self.blocks.let_go(sequence)
        self._listener.ended(sequence, now_s)

    def _grow(self, now_s: float) -> bool:
        """Give those that need a block before the next step one; False when nobody is left to make a step."""
        running = self._running
        for sequence in running.needing():
            slots = self.pool.take(1)
            while slots is None:
                last = running.youngest
                self._preempt(last, now_s)
                if last is sequence:
                    break
                slots = self.pool.take(1)
            if slots is not None:
                filled = sequence.attached + len(sequence.own)
                self.blocks.attach(sequence, filled)
                sequence.own += slots
                running.plan_growth(sequence)
        return bool(running)

    def _preempt(self, sequence: SimSequence, now_s: float) -> None:
        """Send a sequence back to the head of the line; what it computed stays in the cache for as long as it may."""
        self._decoder.leave(sequence)
        self.blocks.attach(
            sequence, min(sequence.computed // self._shape.block_tokens, len(sequence.request.chain.keys))
        )
        self.blocks.save(sequence, now_s, tail=False)
        self.blocks.let_go(sequence)
        sequence.target = sequence.computed + 1
        sequence.computed = 0
        sequence.preempted += 1
        sequence.phase = Phase.WAITING
        self.queue.came_back(sequence)
        self.counters.preemptions += 1


def _shipped(name: str, capacity_blocks: int) -> EvictionPolicy:
    return make_policy(name, capacity_blocks=capacity_blocks)
