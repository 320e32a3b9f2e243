"""What a plan is made from: a request, where it goes, and what is known to be cached of it."""

from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.core.shown import MOST_SHOWN, shown
from kvcontrol.scheduler_ir.nodes import Device, IRError, is_count, is_of, is_seconds


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
        if not isinstance(self.answer, str) or not self.answer:
            raise IRError(f"answer is {shown(self.answer)}; it must be the name of a device")
        if self.handover is not None:
            if not is_of(self.handover, Handover):
                raise IRError(f"handover is {shown(self.handover)}; it must be a Handover, or None")
            self._check_handover(self.handover)

    def _check_handover(self, handover: Handover) -> None:
        if not isinstance(handover.prefill, str) or not handover.prefill:
            raise IRError(f"a handover's prefill is {shown(handover.prefill)}; it must be the name of a device")
        if not is_of(handover.transport, KVTransport):
            allowed = ", ".join(KVTransport)
            raise IRError(f"a handover's transport is {shown(handover.transport)}; it must be one of {allowed}")
        if handover.prefill == self.answer:
            where = self.answer[:MOST_SHOWN]
            raise IRError(f"a prompt is handed over from {where} to {where}; leave the handover out")

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
        if not problem and self.cached != ():
            problem = self._cached_problem()
        if not problem and self.shared != ():
            problem = self._shared_problem()
        if problem:
            raise IRError(f"request {shown(self.request_id)}: {problem}")

    def _size_problem(self) -> str:
        prompt, most = self.prompt_tokens, self.max_tokens
        if not isinstance(self.request_id, str) or not self.request_id:
            return "its request_id must be a text that is not empty"
        if not (is_count(prompt) and is_count(most) and prompt > 0 and most > 0):
            return f"prompt_tokens is {shown(prompt)}, max_tokens {shown(most)}; both must be 64-bit integers > 0"
        if not is_of(self.placement, Placement):
            return f"its placement is {shown(self.placement)}; it must be a Placement"
        return ""

    def _time_problem(self) -> str:
        if not is_count(self.priority):
            return f"priority is {shown(self.priority)}; it must be a 64-bit integer"
        if self.deadline_s is not None and not is_seconds(self.deadline_s):
            return f"deadline_s is {shown(self.deadline_s)}; it must be a finite number of seconds, or None"
        if self.reuse_s is not None and not (is_seconds(self.reuse_s) and self.reuse_s >= 0):
            return f"reuse_s is {shown(self.reuse_s)}; it must be a finite number of seconds >= 0, or None"
        return ""

    def cached_on(self, device: Device) -> tuple[CachedRun, ...]:
        """Return what lies on one device."""
        return tuple(each for each in self.cached if each.device == device)

    def _cached_problem(self) -> str:
        if not is_of(self.cached, tuple):
            return f"cached is {shown(self.cached)}; it must be a tuple of CachedRun"
        ends: dict[Device, int] = {}
        for run in self.cached:
            if not is_of(run, CachedRun):
                return f"cached holds {shown(run)}; it must be a tuple of CachedRun"
            if not isinstance(run.device, str) or not run.device:
                return f"the device of a cached run is {shown(run.device)}; it must be the name of one"
            if not is_of(run.tier, CacheTier):
                return f"the tier of a cached run is {shown(run.tier)}; it must be one of {', '.join(CacheTier)}"
            before = ends.get(run.device, 0)
            if not is_count(run.end) or not before < run.end <= self.prompt_tokens:
                return (
                    f"a cached run on {run.device[:MOST_SHOWN]} ends at {shown(run.end)}; it must be a 64-bit integer "
                    f"> {shown(before)} and <= {shown(self.prompt_tokens)}, as they rise within the prompt"
                )
            ends[run.device] = run.end
        return ""

    def _shared_problem(self) -> str:
        if not is_of(self.shared, tuple):
            return f"shared is {shown(self.shared)}; it must be a tuple of SharedPrefix"
        before = 0
        for prefix in self.shared:
            if not is_of(prefix, SharedPrefix):
                return f"shared holds {shown(prefix)}; it must be a tuple of SharedPrefix"
            if not is_of(prefix.key, bytes):
                return f"the key of a shared prefix is {shown(prefix.key)}; it must be bytes"
            if not is_count(prefix.end) or not before < prefix.end <= self.prompt_tokens:
                return (
                    f"a shared prefix ends at {shown(prefix.end)}; it must be a 64-bit integer "
                    f"> {shown(before)} and <= {shown(self.prompt_tokens)}, as they rise within the prompt"
                )
            before = prefix.end
        return ""
