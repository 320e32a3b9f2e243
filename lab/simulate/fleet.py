"""A fleet in virtual time: the gateway's planner, residency index, load and limits before simulated engines.

    arrival ─▶ Door (limits, queue) ─▶ Planner ─▶ SimEngine ─▶ first token, end ─▶ Planner, Door
                                          ▲             │ KV events
                                          └─ FleetIndex ◀┘

Everything happens on one clock, event by event: the next arrival, or the engine that has something to do next. Nothing
sleeps, so an hour takes as long as its decisions. What the gateway would do between threads, processes or hosts is done
at once here: KV events arrive when they happen, a request is at its engine when it is routed.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from time import thread_time
from typing import Final

from msgspec.structs import replace as replace_struct

from engines.sim.behaviour import Behaviour
from engines.sim.engine import SimEngine
from engines.sim.gaps import GapHistogram
from engines.sim.profile import Profile
from engines.sim.room import DoesNotFitError
from engines.sim.sequence import SimRequest, SimSequence
from gateway.fingerprint.fingerprint import KnownBlocks
from gateway.placement.planner import Plan, Planner
from gateway.registry import Instance, LoadTracker, Permit
from gateway.routing import Calibration, CostModel, LearnedAffinity, RecentRoutes, RoutingPolicy
from gateway.types import Usage
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, PromptChain
from lab.simulate.admission import AdmissionRules, SimAdmission
from lab.simulate.arrivals import NEVER, Arrivals, ClosedLoop, OpenLoop
from lab.simulate.clock import SimClock
from lab.simulate.index_sink import IndexSink
from lab.simulate.outcome import FleetOutcome, Served, Tally, quantile
from lab.simulate.snapshot import MODEL, snapshot
from lab.simulate.workload import Arrival, Workload

_REPORT_S: Final = 1.0
"""How often instances are asked how they do."""
_TIMED: Final = 16
"""One in so many decisions is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """``make_policy`` gets what is assumed of an instance before anything was measured; ``route_memory_s`` and the rest
    are the gateway's settings. ``users`` send in a closed loop, for ``duration_s`` (see ``ClosedLoop``); 0: the trace's
    times say when requests come.
    """

    profile: Profile
    instances: int
    make_policy: Callable[[CostModel], RoutingPolicy]
    costs: CostModel = field(default_factory=lambda: CostModel(prefill_tokens_per_s=2000.0, decode_load_s=0.02))
    route_memory_s: float = 10.0
    rules: AdmissionRules = field(default_factory=AdmissionRules)
    behaviour: Behaviour = field(default_factory=Behaviour)
    users: int = 0
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ValueError(f"a fleet of {self.instances} instances; there must be at least 1")


class _Request:
    """One request on its way: where it is, and what is to be told when it gets on."""

    __slots__ = ("arrival", "member", "permit", "plan", "sent_s", "ttft_s")

    plan: Plan
    permit: Permit
    member: "_Member"
    sent_s: float
    ttft_s: float

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival


class _Member:
    """One instance: its engine, the gateway's snapshot of it, and the requests that it has. Its engine's listener."""

    __slots__ = ("_fleet", "engine", "instance", "planned_s", "requests")

    engine: SimEngine

    def __init__(self, fleet: "Fleet", instance: Instance) -> None:
        self._fleet = fleet
        self.instance = instance
        self.requests: dict[SimSequence, _Request] = {}
        self.planned_s = NEVER

    def produced(self, sequence: SimSequence, tokens: int, now_s: float) -> None:
        """See ``Listener``: of an answer the gateway looks at the first token."""
        if sequence.generated == tokens:
            self._fleet.began(self, self.requests[sequence], now_s)

    def ended(self, sequence: SimSequence, now_s: float) -> None:
        """See ``Listener``."""
        self._fleet.ended(self, self.requests.pop(sequence), sequence, now_s)


class Fleet:
    """See the module's text; made for one workload."""

    def __init__(self, plan: FleetPlan, workload: Workload) -> None:
        shape = plan.profile.engine.with_block_tokens(workload.block_tokens)
        self._plan, self._workload = plan, workload
        self._identity = CacheIdentity(
            model=MODEL,
            revision=plan.profile.name,
            kv_dtype=shape.kv_dtype,
            block_size_tokens=shape.block_tokens,
        )
        self._clock = SimClock()
        self._index = FleetIndex()
        self._load = LoadTracker(clock=self._clock)
        policy = plan.make_policy(plan.costs)
        self._policy = policy.name
        self._planner = Planner(
            policy=policy,
            index=self._index,
            load=self._load,
            recent=RecentRoutes(lifetime_s=plan.route_memory_s),
            learned=LearnedAffinity(self._index, capacity_tokens=1),
            calibration=Calibration(plan.costs),
            clock=self._clock,
        )
        profile = replace(plan.profile, engine=shape)
        self._members = [self._member(place, profile) for place in range(plan.instances)]
        self._by_id = {each.instance.id: each for each in self._members}
        self._admission = SimAdmission(
            [each.instance for each in self._members], load=self._load, rules=plan.rules, clock=self._clock
        )
        self._arrivals = _arrivals(plan, workload, self._identity)
        self._agenda: list[tuple[float, int, _Member]] = []
        self._ticks = count()
        self._tally = Tally()
        self._decisions = self._sent = 0

    def run(
        self,
        progress: Callable[[float], None] = lambda _: None,
        hopeless: Callable[[Tally], bool] = lambda _: False,
    ) -> FleetOutcome:
        """Serve the whole workload; ``progress`` is told now and then what time it is, and ``hopeless`` asked whether
        what was counted so far is enough to stop, in which case the outcome is of that and not ``complete``.
        """
        agenda, clock, arrivals = self._agenda, self._clock, self._arrivals
        report_s = _REPORT_S
        while agenda or arrivals.next_s < NEVER:
            if agenda and agenda[0][0] <= arrivals.next_s:
                self._advance_engine()
                continue
            arrival = arrivals.pop()
            self._sent += 1
            clock.now_s = arrival.at_s
            if arrival.at_s >= report_s:
                self._report()
                progress(arrival.at_s)
                self._tally.shed = self._admission.shed
                if hopeless(self._tally):
                    return self._outcome(complete=False)
                report_s = arrival.at_s + _REPORT_S
            self._arrived(arrival)
        return self._outcome(complete=True)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when engines, index and load contradict each other. O(blocks)."""
        self._index.check_integrity()
        for each in self._members:
            each.engine.check_integrity()
            held = self._index.blocks_held(each.instance.id).get(CacheTier.HBM, 0)
            if held != len(each.engine.pool.cached):
                raise AssertionError(f"{each.instance.id}: {held} blocks in the index, {len(each.engine.pool.cached)}")
            if len(each.requests) != self._load.in_flight(each.instance.id):
                raise AssertionError(f"{each.instance.id}: load and requests differ")

    def close(self) -> None:
        """Let go of the engines."""
        for each in self._members:
            each.engine.close()

    # Events.

    def _advance_engine(self) -> None:
        """Let the engine that has something to do next do it."""
        at_s, _, member = heapq.heappop(self._agenda)
        if at_s != member.planned_s:
            return  # it was planned anew
        self._clock.now_s = max(self._clock.now_s, at_s)
        member.engine.advance(at_s)
        self._schedule(member)
        self._pump()

    def _schedule(self, member: _Member) -> None:
        at_s = member.engine.next_event_s
        if at_s != member.planned_s:
            member.planned_s = at_s
            if at_s != NEVER:
                heapq.heappush(self._agenda, (at_s, next(self._ticks), member))

    def _arrived(self, arrival: Arrival) -> None:
        request = _Request(arrival)
        if self._admission.enter(request, arrival.prompt_tokens):
            self._route(request)
        self._pump()

    def _route(self, request: _Request) -> None:
        arrival = request.arrival
        size = self._identity.block_size_tokens
        fingerprint = KnownBlocks(
            arrival.keys[: (arrival.prompt_tokens - 1) // size], model=MODEL, block_size_tokens=size
        )
        fingerprint.tokens = arrival.prompt_tokens
        self._decisions += 1
        if self._decisions % _TIMED:
            plan = self._planner.plan(fingerprint, self._admission.usable())
        else:
            began_s = thread_time()
            plan = self._planner.plan(fingerprint, self._admission.usable())
            self._tally.decision_s.append(thread_time() - began_s)
        member = self._by_id[plan.instance.id]
        now_s = self._clock.now_s
        request.plan, request.member, request.sent_s = plan, member, now_s
        request.permit = self._load.placed(plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold)
        self._admission.placed(member.instance)
        chain = PromptChain(BlockHash(b""), block_size_tokens=size, source=_no_tokens)
        chain.keys = list(arrival.keys)
        chain.block_tokens = list(arrival.keys)  # names stand for the tokens that they are of
        try:
            sequence = member.engine.submit(
                SimRequest(
                    request_id="",
                    chain=chain,
                    prompt_tokens=arrival.prompt_tokens,
                    output_tokens=arrival.output_tokens,
                ),
                now_s,
            )
        except DoesNotFitError:
            self._tally.refused += 1
            self._leave(request)
            return
        member.requests[sequence] = request
        self._schedule(member)

    def began(self, member: _Member, request: _Request, now_s: float) -> None:
        """A request's first token has come."""
        took_s = now_s - request.sent_s
        self._admission.answered(member.instance, after_s=took_s)
        request.permit.first_byte()
        self._planner.computed(request.plan)
        self._planner.began(request.plan, took_s=took_s)
        request.ttft_s = now_s - request.arrival.at_s
        self._tally.ttft_s.append(request.ttft_s)

    def ended(self, member: _Member, request: _Request, sequence: SimSequence, now_s: float) -> None:
        """A request is answered. Whoever takes its place is let in when the engine's turn is over."""
        del member
        arrival, tally = request.arrival, self._tally
        usage = Usage(
            prompt_tokens=arrival.prompt_tokens,
            completion_tokens=arrival.output_tokens,
            cached_tokens=sequence.cached_tokens,
        )
        self._planner.ended(request.plan, usage, took_s=now_s - request.sent_s)
        tally.answer_s.append(now_s - arrival.at_s)
        tally.prompt_tokens += arrival.prompt_tokens
        for tier, tokens in sequence.cached_by_tier.items():
            tally.by_tier[tier] = tally.by_tier.get(tier, 0) + tokens
        tally.served.append(
            Served(
                number=arrival.number,
                copy=arrival.copy,
                ttft_s=request.ttft_s,
                prompt_tokens=arrival.prompt_tokens,
                found_tokens=sum(sequence.cached_by_tier.values()),
                at_s=arrival.at_s,
                answer_s=now_s - arrival.at_s,
                output_tokens=arrival.output_tokens,
            )
        )
        self._leave(request)

    def _leave(self, request: _Request) -> None:
        self._arrivals.over(request.arrival, self._clock.now_s)
        request.permit.release()
        self._admission.placed(request.member.instance)

    def _pump(self) -> None:
        """Route those whose turn it is."""
        while self._admission.waiting and isinstance(request := self._admission.next_in(), _Request):
            self._route(request)

    def _report(self) -> None:
        """Instances say how many wait there."""
        for each in self._members:
            stats, waiting = each.instance.stats, each.engine.waiting
            if stats is not None and stats.load.waiting != waiting:
                load = replace_struct(stats.load, running=each.engine.running, waiting=waiting)
                each.instance = replace(each.instance, stats=replace_struct(stats, load=load))
        self._admission.reported([each.instance for each in self._members])

    # The beginning and the end.

    def _member(self, place: int, profile: Profile) -> _Member:
        name = InstanceId(f"sim-{place:04}")
        member = _Member(self, snapshot(name, profile, self._identity))
        behaviour = replace(self._plan.behaviour, seed=self._plan.behaviour.seed * 65_537 + place)
        member.engine = SimEngine(profile, listener=member, sink=IndexSink(self._index, name), behaviour=behaviour)
        return member

    def _ceiling_tokens(self) -> int:
        if not self._plan.users:
            return self._workload.ceiling_tokens()[1]
        sent = sorted(self._tally.served, key=lambda each: each.at_s)
        return self._workload.ceiling_of((each.copy, each.number) for each in sent)[1]

    def _outcome(self, *, complete: bool) -> FleetOutcome:
        tally, engines = self._tally, [each.engine for each in self._members]
        busy_s = [each.counters.busy_s for each in engines]
        mean_s = sum(busy_s) / len(busy_s)
        gaps = GapHistogram()
        for each in engines:
            gaps.merge(each.gaps)
        tally.ttft_s.sort()
        tally.answer_s.sort()
        tally.decision_s.sort()
        return FleetOutcome(
            policy=self._policy,
            instances=len(engines),
            requests=self._sent if self._plan.users else self._workload.size,
            shed=self._admission.shed,
            refused=tally.refused,
            ttft_s=tally.ttft_s,
            answer_s=tally.answer_s,
            prompt_tokens=tally.prompt_tokens,
            found_by_tier=dict(tally.by_tier),
            ceiling_tokens=self._ceiling_tokens(),
            hotspot=max(busy_s) / mean_s if mean_s else 1.0,
            busy=mean_s / self._clock.now_s if self._clock.now_s else 0.0,
            lasts_s=self._clock.now_s,
            preemptions=sum(each.counters.preemptions for each in engines),
            gaps=gaps,
            decision_us=(quantile(tally.decision_s, 0.5) or 0.0) * 1e6,
            computed_tokens=sum(each.counters.computed_tokens for each in engines),
            requests_by_instance=[each.counters.requests for each in engines],
            complete=complete,
            served=tally.served,
        )


def _arrivals(plan: FleetPlan, workload: Workload, identity: CacheIdentity) -> Arrivals:
    if plan.users:
        return ClosedLoop(workload, identity, users=plan.users, duration_s=plan.duration_s)
    return OpenLoop(workload, identity)


def _no_tokens(first: int, last: int) -> bytes:
    raise AssertionError(f"tokens {first} to {last} of a prompt of which only names are known")
