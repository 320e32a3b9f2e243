"""What a plan is made from: a request, where it goes, and what is known to be cached of it."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir.nodes import Device, IRError


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The prompt is computed on ``prefill``, and its KV gets to whoever answers by ``transport``."""

    prefill: Device
    transport: KVTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request is answered, and whether its prompt is computed elsewhere (``handover``) or there (None). Raises
    ``IRError`` for a handover to where it comes from.
    """

    answer: Device
    handover: Handover | None = None

    def __post_init__(self) -> None:
        if self.handover is not None and self.handover.prefill == self.answer:
            raise IRError(f"a prompt is handed over from {self.answer} to {self.answer}; leave the handover out")

    @property
    def prefill(self) -> Device:
        """Where its prompt is computed."""
        return self.answer if self.handover is None else self.handover.prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """Tokens of the prompt, from where the run before it on the same device ends (or 0) to ``end``, lie in ``tier``."""

    device: Device
    tier: CacheTier
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The first ``end`` tokens are those of every request with an equal ``key`` and ``end``: a chained block hash."""

    key: bytes
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IRRequest:
    """One request. ``cached`` and ``shared`` are in ascending order of ``end``, the first device by device.

    ``priority`` is higher for what is more important; ``deadline_s`` is when its first token is due, on the caller's
    clock; ``reuse_s`` in how long its KV is expected to be asked for again; None where nothing is known.
    Raises ``IRError`` for numbers that can't be.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    placement: Placement
    priority: int = 0
    deadline_s: float | None = None
    cached: tuple[CachedRun, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()
    reuse_s: float | None = None

    def __post_init__(self) -> None:
        problem = self._size_problem() or self._time_problem()
        if not problem and self.cached:
            problem = self._cached_problem()
        if not problem and self.shared:
            problem = self._shared_problem()
        if problem:
            raise IRError(f"request {self.request_id!r}: {problem}")

    def _size_problem(self) -> str:
        prompt, most = self.prompt_tokens, self.max_tokens
        if not isinstance(self.request_id, str) or not self.request_id:
            return "its request_id must be a text that is not empty"
        if not (isinstance(prompt, int) and isinstance(most, int) and prompt > 0 and most > 0):
            return f"prompt_tokens is {prompt!r}, max_tokens {most!r}; both must be > 0"
        if not _is(self.placement, Placement):
            return f"its placement is {self.placement!r}; it must be a Placement"
        return ""

    def _time_problem(self) -> str:
        if not _is(self.priority, int):
            return f"priority is {self.priority!r}; it must be an integer"
        if self.deadline_s is not None and not _is_number(self.deadline_s, -inf):
            return f"deadline_s is {self.deadline_s!r}; it must be a finite number of seconds, or None"
        if self.reuse_s is not None and not _is_number(self.reuse_s, 0):
            return f"reuse_s is {self.reuse_s!r}; it must be a finite number of seconds >= 0, or None"
        return ""

    def cached_on(self, device: Device) -> tuple[CachedRun, ...]:
        """Return what lies on one device."""
        return tuple(each for each in self.cached if each.device == device)

    def _cached_problem(self) -> str:
        ends: dict[Device, int] = {}
        for run in self.cached:
            before = ends.get(run.device, 0)
            if not isinstance(run.end, int) or not before < run.end <= self.prompt_tokens:
                return (
                    f"a cached run on {run.device} ends at {run.end!r}; it must be > {before} and "
                    f"<= {self.prompt_tokens}"
                )
            ends[run.device] = run.end
        return ""

    def _shared_problem(self) -> str:
        ends = [0, *(each.end for each in self.shared)]
        if not all(isinstance(end, int) for end in ends):
            return "the ends of its shared prefixes are no integers"
        if any(left >= right for left, right in pairwise(ends)):
            return "the ends of its shared prefixes don't rise"
        return ""


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind)


def _is_number(value: float, least: float) -> bool:
    """Whether it is finite and at least that."""
    return isinstance(value, int | float) and least <= value < inf and value != -inf


__all__ = ["CachedRun", "Handover", "IRRequest", "Placement", "SharedPrefix"]
