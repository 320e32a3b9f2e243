"""A second simulator of a fleet, written from the pages alone and to be read: no product code decides anything here.

One step after the other, a list for everything, blocks as prefixes of ids. HBM has room for all blocks: nothing is ever
evicted or preempted. Its engines follow ``docs/design/simulation.md``, its routers ``docs/design/gateway.md``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lab.traces import Request

SHORT_STEPS = 3
WINDOW = 8
PATIENCE = 3
CHUNK = 8192


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, as a profile's ``[time]`` has them."""

    step: float
    token: float
    pair: float
    context: float
    decode: float
    sequence: float
    decode_context: float


@dataclass(kw_only=True)
class Job:
    """A request at an instance."""

    request: Request
    at_s: float
    blocks: list[tuple[int, ...]]
    found: int = 0
    computed: int = 0
    generated: int = 0
    first_s: float = 0.0

    @property
    def left(self) -> int:
        return self.request.prompt_tokens - self.computed


@dataclass(kw_only=True)
class Instance:
    """An engine, and what a gateway remembers of it."""

    name: int
    times: Times
    batch: int
    step_tokens: int
    now_s: float = 0.0
    cached: set[tuple[int, ...]] = field(default_factory=set)
    waiting: list[Job] = field(default_factory=list)
    prompts: list[Job] = field(default_factory=list)
    answers: list[Job] = field(default_factory=list)
    over: list[Job] = field(default_factory=list)
    long: Job | None = None
    shorts: int = 0
    decode_next: bool = False
    last_request: int = 0
    last_cold: int = 0
    recent: float = 0.0
    recent_s: float = 0.0

    @property
    def jobs(self) -> list[Job]:
        return [*self.waiting, *self.prompts, *self.answers]

    def held(self, blocks: Sequence[tuple[int, ...]]) -> int:
        return next((place for place, block in enumerate(blocks) if block not in self.cached), len(blocks))

    def run_until(self, until_s: float) -> None:
        """Make all steps that begin before this moment."""
        while self.jobs and self.now_s < until_s:
            self.step()
        if not self.jobs:
            self.now_s = max(self.now_s, until_s)

    def step(self) -> None:
        while self.waiting and len(self.prompts) + len(self.answers) < self.batch:
            job = self.waiting.pop(0)
            size = job.request.block_tokens
            job.found = job.computed = size * min(self.held(job.blocks), (job.request.prompt_tokens - 1) // size)
            self.prompts.append(job)
        if self.prompts and not (self.decode_next and self.answers):
            self.prefill()
        else:
            self.decode()

    def prefill(self) -> None:
        chunks = self.chunks()
        self.now_s += self.times.step
        for job, tokens in chunks:
            before = job.computed
            self.now_s += (
                tokens * self.times.token
                + tokens * (before + tokens / 2) * self.times.pair
                + before * self.times.context
            )
            job.computed += tokens
            self.cached.update(job.blocks[: job.computed // job.request.block_tokens])
        self.decode_next = True
        for job, _ in chunks:
            if not job.left:
                self.prompts.remove(job)
                job.first_s, job.generated = self.now_s, 1
                (self.answers if (job.request.output_tokens or 1) > 1 else self.over).append(job)

    def chunks(self) -> list[tuple[Job, int]]:
        if self.long is not None and self.long.left <= self.step_tokens:
            job, self.long = self.long, None
            return [(job, job.left)]
        shorts = [job for job in self.prompts if job.left <= self.step_tokens]
        longs = [job for job in self.prompts if job.left > self.step_tokens]
        long = self.long or (longs[0] if longs else None)
        if long is None or (shorts and self.shorts < SHORT_STEPS):
            self.shorts += long is not None
            return self.together(shorts, passing=long is not None)
        self.long, self.shorts = long, 0
        return [(long, self.step_tokens)]

    def together(self, shorts: Sequence[Job], *, passing: bool) -> list[tuple[Job, int]]:
        taken: list[tuple[Job, int]] = []
        room = self.step_tokens
        for job in shorts:
            if job.left <= room:
                taken.append((job, job.left))
                room -= job.left
            elif not passing:
                break
        return taken

    def decode(self) -> None:
        contexts = sum(job.request.prompt_tokens + job.generated - 1 for job in self.answers)
        self.now_s += self.times.decode + len(self.answers) * self.times.sequence + contexts * self.times.decode_context
        self.decode_next = False
        for job in self.answers:
            job.generated += 1
        self.over += [job for job in self.answers if job.generated == job.request.output_tokens]
        self.answers = [job for job in self.answers if job.generated < (job.request.output_tokens or 1)]


@dataclass(kw_only=True)
class PlainFleet:
    """Equal instances behind one router."""

    instances: list[Instance]
    router: Callable[["PlainFleet", Job], Instance]
    requests: int = 0
    now_s: float = 0.0

    def serve(self, requests: Sequence[Request]) -> list[Job]:
        """Return the jobs of all requests, which are ordered by time."""
        jobs = []
        for request in requests:
            self.now_s = request.at_s
            for each in self.instances:
                each.run_until(self.now_s)
            full = request.prompt_tokens // request.block_tokens
            ids = tuple(request.block_ids)
            job = Job(request=request, at_s=request.at_s, blocks=[ids[: place + 1] for place in range(full)])
            chosen = self.router(self, job)
            match = self.matched(chosen, job)
            self.requests += 1
            chosen.last_request = self.requests
            if not match:
                chosen.last_cold = self.requests
            chosen.recent = self.recent(chosen) + request.prompt_tokens - match
            chosen.recent_s = self.now_s
            chosen.waiting.append(job)
            jobs.append(job)
        for each in self.instances:
            each.run_until(float("inf"))
        return jobs

    def recent(self, each: Instance) -> float:
        return each.recent * 0.5 ** ((self.now_s - each.recent_s) / 30)

    def matched(self, each: Instance, job: Job) -> int:
        """Tokens that an instance has, or is about to have of what it was sent."""
        size, limit = job.request.block_tokens, (job.request.prompt_tokens - 1) // job.request.block_tokens
        there = each.cached.union(*(other.blocks for other in each.jobs))
        return size * next((at for at, block in enumerate(job.blocks[:limit]) if block not in there), limit)

    def starved(self, chosen: Instance, job: Job) -> Instance | None:
        """Who got none of the latest requests, where the prompt parts from the match where another one goes on."""
        other = min(self.instances, key=lambda each: (each.last_request, each.name))
        if self.requests - other.last_request <= PATIENCE * len(self.instances) or other is chosen:
            return None
        end = chosen.held(job.blocks)
        parts = 0 < end < len(job.blocks) and any(
            len(block) > end and block[:end] == job.blocks[end - 1] for block in chosen.cached
        )
        match = self.matched(chosen, job)
        lost = match - self.matched(other, job)
        return other if parts and match == end * job.request.block_tokens and lost <= CHUNK else None


def round_robin(fleet: PlainFleet, job: Job) -> Instance:
    """The instance without a request for longest."""
    del job
    return min(fleet.instances, key=lambda each: (each.last_request, each.name))


def prefix_affinity(fleet: PlainFleet, job: Job) -> Instance:
    """The longest match among those about as busy as the least busy one."""
    least = min(len(each.jobs) for each in fleet.instances)
    candidates = [each for each in fleet.instances if len(each.jobs) <= least + WINDOW]

    def rank(each: Instance) -> tuple[int, int, int, int, int]:
        match = fleet.matched(each, job)
        return -match, len(each.jobs), 0 if match else each.last_cold, each.last_request, each.name

    chosen = min(candidates, key=rank)
    other = fleet.starved(chosen, job) if fleet.matched(chosen, job) else None
    return other if other in candidates else chosen


def cost_aware(fleet: PlainFleet, job: Job) -> Instance:
    """The lowest cost in seconds: prefill three times, the queue before it, running requests, and a little spread."""
    times, tokens = fleet.instances[0].times, job.request.prompt_tokens
    per_token = times.token + tokens / 2 * times.pair
    match = {each.name: fleet.matched(each, job) for each in fleet.instances}
    least = min(fleet.recent(each) for each in fleet.instances)

    def load(each: Instance, own: int) -> float:
        queued = [other.left for other in (*each.waiting, *each.prompts)]
        if own <= CHUNK:
            longs = sum(left for left in queued if left > CHUNK)
            queued = [left for left in queued if left <= CHUNK] + [min(longs, CHUNK)]
        return times.step + sum(queued) * per_token + len(each.jobs) * max(0.005, times.decode)

    def cost(each: Instance) -> float:
        own = tokens - match[each.name]
        excess = min(0.1 * (fleet.recent(each) - least), CHUNK) if len(set(match.values())) > 1 else 0.0
        return load(each, own) + (3 * own + excess) * per_token

    costs = {each.name: cost(each) for each in fleet.instances}
    lowest = min(costs.values())
    tied = [each for each in fleet.instances if costs[each.name] <= lowest + max(0.005, 0.05 * lowest)]
    if any(match.values()):
        chosen = min(tied, key=lambda each: (-match[each.name], costs[each.name], fleet.recent(each), each.name))
    else:
        chosen = min(tied, key=lambda each: (len(each.jobs), fleet.recent(each), each.last_cold, each.name))
    other = fleet.starved(chosen, job) if match[chosen.name] else None
    if other is not None and load(other, tokens) <= 1.05 * load(chosen, tokens) + 0.005:
        return other
    return chosen
