"""A machine that carries out steps on symbols instead of KV: what a graph means is what this does with it.

A token of KV is a symbol that says what it was computed from; equal beginnings give equal symbols. The machine knows
which symbols lie where, refuses a step whose tokens aren't there, and never holds more than a device's capacity.
Token by token and in no hurry: graphs of tests and of bug reports, not of the hot path.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.nodes import (
    CONSUMING,
    DecodeConfig,
    Device,
    EvictConfig,
    IRError,
    IRNode,
    JoinConfig,
    LoadConfig,
    NodeType,
    PinConfig,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import DeviceLimits
from kvcontrol.scheduler_ir.request import IRRequest
from kvcontrol.scheduler_ir.spans import KvSpan
from lab.research.ir.spans import covered, given_span

Symbol = tuple[bytes | str, int]
"""What a token's KV was computed from: a shared prefix or a request of its own, and its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request was answered with: the symbols of its whole prompt, and how many tokens may follow."""

    device: Device
    prompt: tuple[Symbol, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a graph. ``answers`` are in the order in which they were given; ``peak_tokens`` is the most that
    each device held at once; ``left`` are the pieces that are still there at the end.
    """

    answers: Mapping[str, Answer]
    peak_tokens: Mapping[Device, int]
    computed_tokens: int
    loaded_tokens: int
    moved_tokens: int
    left: tuple[KvSpan, ...]
    pinned: frozenset[ValueName]


@dataclass(slots=True)
class _Counts:
    computed: int = 0
    loaded: int = 0
    moved: int = 0


@dataclass(slots=True)
class _Memory:
    """One device's: how many live pieces hold each symbol, and what its tiers keep besides."""

    held: Counter[Symbol] = field(default_factory=Counter)
    kept: dict[CacheTier, set[Symbol]] = field(default_factory=dict)
    peak: int = 0


class Machine:
    """The state of a run; ``step`` changes it, or raises ``IRError`` and changes nothing."""

    def __init__(self, requests: Iterable[IRRequest], limits: Mapping[Device, DeviceLimits] | None = None) -> None:
        self._requests = {each.request_id: each for each in requests}
        self._limits = limits or {}
        self._spans: dict[ValueName, KvSpan] = {}
        self._memory: dict[Device, _Memory] = {}
        self._pinned: set[ValueName] = set()
        self._answers: dict[str, Answer] = {}
        self._counts = _Counts()
        for request in self._requests.values():
            for device in dict.fromkeys(run.device for run in request.cached):
                start = 0
                for run in request.cached_on(device):
                    kept = self._of(device).kept.setdefault(run.tier, set())
                    kept.update(_symbol(request, place) for place in range(start, run.end))
                    start = run.end

    def step(self, node: IRNode) -> None:
        """Carry out one node."""
        taken = self._taken(node)
        given = given_span(node, taken)
        self._check(node, taken)
        if given is not None and node.node_type is not NodeType.JOIN:
            self._hold(given, node.describe())
        self._count(node)
        match node.config:
            case DecodeConfig(request=request, start=start, max_tokens=most):
                prompt = tuple(_symbol(self._request(node), place) for place in range(start))
                self._answers[request] = Answer(device=node.device, prompt=prompt, max_tokens=most)
            case EvictConfig(keep=keep):
                for span in taken:
                    self._let_go(span, keep)
            case JoinConfig():
                for span in taken:
                    del self._spans[span.name]
            case PinConfig():
                self._pinned.update(node.inputs)
            case _:
                pass
        if given is not None:
            self._spans[given.name] = given

    def outcome(self) -> Outcome:
        """Return what has become of all so far."""
        return Outcome(
            answers=dict(self._answers),
            peak_tokens={device: memory.peak for device, memory in self._memory.items() if memory.peak},
            computed_tokens=self._counts.computed,
            loaded_tokens=self._counts.loaded,
            moved_tokens=self._counts.moved,
            left=tuple(self._spans.values()),
            pinned=frozenset(self._pinned),
        )

    def held_tokens(self, device: Device) -> int:
        """How many tokens a device holds now, shared ones once."""
        return len(self._of(device).held)

    def release(self) -> None:
        """Let go of everything that isn't pinned, as when a plan ends early."""
        for span in [each for each in self._spans.values() if each.name not in self._pinned]:
            self._let_go(span, None)

    def _taken(self, node: IRNode) -> list[KvSpan]:
        """Return the pieces that a node takes, which are on its device."""
        what = node.describe()
        missing = [f"%{each}" for each in node.inputs if each not in self._spans]
        if missing:
            raise IRError(f"{what}: {', '.join(missing)} is not there (any more)")
        taken = [self._spans[each] for each in node.inputs]
        for span in taken:
            if span.device != node.device:
                raise IRError(f"{what}: %{span.name} lies on {span.device}, not on {node.device}")
            if span.name in self._pinned and node.node_type in CONSUMING:
                raise IRError(f"{what}: %{span.name} is pinned")
        return taken

    def _check(self, node: IRNode, taken: Sequence[KvSpan]) -> None:
        """Refuse a step whose tokens aren't there."""
        config, what = node.config, node.describe()
        match config:
            case LoadConfig():
                self._check_load(node, config, taken)
            case PrefillConfig():
                self._check_prompt(node, taken, config.start)
                if config.end > self._request(node).prompt_tokens:
                    raise IRError(f"{what}: its request's prompt ends at {self._request(node).prompt_tokens}")
            case TransferConfig():
                _check_transfer(what, config, taken[0])
            case DecodeConfig():
                self._check_prompt(node, taken, config.start)
                self._check_decode(node, config)
            case _:
                pass

    def _check_prompt(self, node: IRNode, taken: Sequence[KvSpan], until: int) -> None:
        """What is computed or answered stands on its request's tokens [0, until), all of them and in order."""
        what = node.describe()
        start, end = covered(taken, of=what) if taken else (0, 0)
        if (start, end) != (0, until):
            raise IRError(f"{what}: its pieces cover [{start}, {end}); it needs [0, {until})")
        if taken and taken[0].request != node.request:
            raise IRError(f"{what}: its pieces are of {taken[0].request}, not of {node.request}")

    def _check_decode(self, node: IRNode, config: DecodeConfig) -> None:
        request = self._request(node)
        if (config.start, config.max_tokens) != (request.prompt_tokens, request.max_tokens):
            raise IRError(
                f"{node.describe()}: start is {config.start}, max_tokens {config.max_tokens}; its request has "
                f"{request.prompt_tokens} and {request.max_tokens}"
            )
        if config.request in self._answers:
            raise IRError(f"{node.describe()}: {config.request} has been answered before")

    def _check_load(self, node: IRNode, config: LoadConfig, taken: Sequence[KvSpan]) -> None:
        there: set[Symbol]
        if taken:
            owner = self._requests[taken[0].request]
            there = {_symbol(owner, place) for place in range(taken[0].start, taken[0].end)}
        else:
            there = self._of(node.device).kept.get(config.tier, set())
        request = self._request(node)
        for place in range(config.start, config.end):
            if _symbol(request, place) not in there:
                where = f"%{taken[0].name}" if taken else f"{config.tier} of {node.device}"
                raise IRError(f"{node.describe()}: token {place} of {config.request} is not in {where}")

    def _count(self, node: IRNode) -> None:
        match node.config:
            case LoadConfig(start=start, end=end):
                self._counts.loaded += end - start
            case PrefillConfig(start=start, end=end):
                self._counts.computed += end - start
            case TransferConfig(start=start, end=end):
                self._counts.moved += end - start
            case _:
                pass

    def _hold(self, span: KvSpan, what: str) -> None:
        memory = self._of(span.device)
        symbols = [_symbol(self._requests[span.request], place) for place in range(span.start, span.end)]
        after = len(memory.held) + sum(each not in memory.held for each in symbols)
        limits = self._limits.get(span.device)
        if limits is not None and limits.capacity_tokens and after > limits.capacity_tokens:
            raise IRError(f"{what}: {span.device} would hold {after} tokens; its capacity is {limits.capacity_tokens}")
        memory.held.update(symbols)
        memory.peak = max(memory.peak, after)

    def _let_go(self, span: KvSpan, keep: CacheTier | None) -> None:
        memory, request = self._of(span.device), self._requests[span.request]
        for place in range(span.start, span.end):
            symbol = _symbol(request, place)
            memory.held[symbol] -= 1
            if not memory.held[symbol]:
                del memory.held[symbol]
            if keep is not None:
                memory.kept.setdefault(keep, set()).add(symbol)
        del self._spans[span.name]

    def _request(self, node: IRNode) -> IRRequest:
        if node.request not in self._requests:
            raise IRError(f"{node.describe()}: there is no request {shown(node.request)}")
        return self._requests[node.request]

    def _of(self, device: Device) -> _Memory:
        return self._memory.setdefault(device, _Memory())


def _check_transfer(what: str, config: TransferConfig, span: KvSpan) -> None:
    if span.request != config.request or not span.start <= config.start < config.end <= span.end:
        raise IRError(
            f"{what}: %{span.name} has tokens [{span.start}, {span.end}) of {span.request}, not "
            f"[{config.start}, {config.end}) of {config.request}"
        )


def _symbol(request: IRRequest, place: int) -> Symbol:
    for prefix in request.shared:
        if place < prefix.end:
            return prefix.key, place
    return request.request_id, place
