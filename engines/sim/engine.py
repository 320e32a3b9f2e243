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
``max_prefill_tokens``, or so much of one that is longer, and short ones pass long ones (``prefill_order.py``);
between two prefill steps the running answers get one decode step, or as many as the pace asks for (``pacing.py``). A
prompt's last token is always computed. Blocks are cached from the step on that fills them; those that decoding fills
when the sequence next needs room. Where a sequence needs a block and there is none, the sequence that came last makes
way: it goes back to the head of the queue and computes again what it doesn't find in the cache.
"""

import heapq
import math
import random
from collections import deque
from typing import Final

from engines.sim.admission import Admission
from engines.sim.batch import DecodeBatch
from engines.sim.behaviour import Behaviour, Pace
from engines.sim.counters import Counters
from engines.sim.decoding import Decoder, Span
from engines.sim.front import Front
from engines.sim.pacing import Prompts, SimPacer
from engines.sim.pool import PrefixPool
from engines.sim.prefill_order import PrefillOrder
from engines.sim.profile import Profile
from engines.sim.room import need_room
from engines.sim.sequence import Listener, Phase, SimRequest, SimSequence
from engines.sim.sequence_blocks import SequenceBlocks
from engines.sim.sink import BlockSink, SilentSink
from engines.sim.tiers import MakePolicy, SimTiers, shipped_policy
from engines.sim.waiting import SimWaiting
from engines.sim.work import Prefill, Wait
from kvcontrol.core.integrity import must
from kvcontrol.scheduler_ir.pacing import Reason, StepCommand

_NEVER: Final = math.inf
_WHOLE: Final = StepCommand(is_prefill=True, reason=Reason.NOBODY_ANSWERS)


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
        sink, make = sink or SilentSink(), make or shipped_policy
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
                make=make,
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
        self._front = Front(profile.time, behaviour.slow)
        self._admission = Admission(shape, self.pool, self.tiers, self.blocks, self.queue, self.counters)
        self._work: Prefill | Span | Wait | None = None
        self._overlapped: Prefill | None = None
        """A chunk that is computed beside decode steps."""
        self._pacer = SimPacer(
            shape.pace,
            profile.time,
            block_tokens=shape.block_tokens,
            most_tokens=shape.max_prefill_tokens,
            max_batch=shape.max_batch,
        )
        self._prefill_order = PrefillOrder(shape.max_prefill_tokens, self._pacer.overtaken_share)

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
        return len(self.queue) + len(self._front)

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
        if (through_s := self._front.enter(sequence, now_s)) > now_s:
            self._decoder.cut(self._work, through_s)
        else:
            self.queue.came(sequence)
        if self._work is None or isinstance(self._work, Wait):
            self._work = None
            self._begin(now_s)
        elif (
            sequence.phase is Phase.WAITING
            and (running := self.running) < self._shape.max_batch
            and self.queue.first(now_s, running) is sequence
        ):
            self._decoder.cut(self._work, now_s)
        return sequence

    def cancel(self, sequence: SimSequence, now_s: float) -> None:
        """Forget a request at once; one that has ended stays ended."""
        self.advance(now_s)
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.ARRIVING:
            self._front.cancel(sequence)
        elif sequence.phase is Phase.WAITING:
            self.queue.left(sequence)
        elif sequence.phase is Phase.PREFILLING:
            self._prefilling.remove(sequence)
            for work in (self._work, self._overlapped):
                if isinstance(work, Prefill):
                    work.leave_out(sequence)
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
        if isinstance(self._work, Wait):
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
                case Prefill():
                    self._prefilled(work)
                case Span():
                    self._pacer.decoded(work.steps)
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

    def _begin(self, now_s: float) -> None:
        """Choose the next piece of work."""
        self._settle(now_s)
        if self.queue:
            self._admit(now_s)
        may_prefill, running = self._overlapped is None, self._running
        if self._prefilling and may_prefill:
            prompts = Prompts(self._prefilling, self._prefill_order.active(self._prefilling), self.queue)
            command = self._pacer.choose(prompts, answering=len(running), context_tokens=running.context_tokens)
            self._work = self._prefill(now_s, command) if command.is_prefill else None
        if self._work is None and running and self._grow(now_s):
            pace = self._pace() * (1.0 if self._overlapped is None else self._time.overlap_decode)
            single, until_s = bool(self._prefilling), self._interrupted_s()
            self._work = self._decoder.begin(now_s, pace=pace, until_s=until_s, single=single)
        if self._work is None and may_prefill and not self._prefilling and self.queue and not self._loading:
            self._admit(now_s)
        if self._work is None and self._prefilling and self._overlapped is None:  # everybody else has made way
            self._work = self._prefill(now_s, _WHOLE)
        if self._work is None and (until_s := self._interrupted_s()) < _NEVER:
            self._work = Wait(until_s)

    def _settle(self, now_s: float) -> None:
        """Take in what is over by now: cancellations, the front of requests, a chunk beside decode steps, loads."""
        if self._leaving:
            self._dismiss()
        for arrived in self._front.arrived(now_s):
            self.queue.came(arrived)
        if self._overlapped is not None and self._overlapped.end_s <= now_s:  # it is never its prompt's last chunk
            self.counters.steps += 1
            for sequence, tokens in self._overlapped.chunks:
                sequence.computed += tokens
                self.counters.computed_tokens += tokens
            self._overlapped = None
        while self._loading and self._loading[0][0] <= now_s:
            sequence = heapq.heappop(self._loading)[2]
            sequence.phase = Phase.PREFILLING
            self._prefilling.append(sequence)

    def _interrupted_s(self) -> float:
        """Return when something happens beside the work that is done: a load or a chunk is over, a request arrives."""
        return min(
            self._loading[0][0] if self._loading else _NEVER,
            self._front.next_s,
            _NEVER if self._overlapped is None else self._overlapped.end_s,
        )

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
        while self.queue and (running := self.running) < self._shape.max_batch:
            admitted = self._admission.next(now_s, running)
            if admitted is None:
                return
            sequence, ready_s = admitted
            if ready_s > now_s:
                sequence.phase = Phase.LOADING
                heapq.heappush(self._loading, (ready_s, sequence.number, sequence))
            else:
                sequence.phase = Phase.PREFILLING
                self._prefilling.append(sequence)

    def _prefill(self, now_s: float, command: StepCommand) -> Prefill | None:
        """Begin a step that computes prompts, or a part of one; None where it overlaps with decode steps."""
        chunks = self._prefill_order.take(self._prefilling, command.prompt_tokens, command.chunk_tokens)
        seconds = self._time.step_s
        for sequence, tokens in chunks:
            seconds += self._time.chunk_s(tokens, sequence.computed)
            self.blocks.attach(sequence, (sequence.computed + tokens) // self._shape.block_tokens)
        seconds *= self._pace()
        work = Prefill(end_s=now_s + seconds, seconds=seconds, chunks=chunks)
        if command.overlaps and work.is_chunk and self._running:
            work.end_s = now_s + seconds * self._time.overlap_chunk
            self._overlapped = work
            return None
        answering, context = len(self._running), self._running.context_tokens
        self._pacer.prefilled(seconds, is_chunk=work.is_chunk, answering=answering, context_tokens=context)
        return work

    def _prefilled(self, work: Prefill) -> None:
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
