"""What a plan is made from: a request, where it goes, and what is known to be cached of it."""

from dataclasses import dataclass
from itertools import pairwise

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
    """Where a request is answered, and whether its prompt is computed elsewhere (``handover``) or there (None)."""

    answer: Device
    handover: Handover | None = None

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
        if self.prompt_tokens <= 0 or self.max_tokens <= 0:
            raise IRError(
                f"request {self.request_id!r}: prompt_tokens is {self.prompt_tokens}, max_tokens {self.max_tokens}; "
                "both must be > 0"
            )
        if self.cached:
            self._check_cached()
        if self.shared:
            ends = [0, *(each.end for each in self.shared)]
            if any(left >= right for left, right in pairwise(ends)):
                raise IRError(f"request {self.request_id!r}: the ends of its shared prefixes don't rise")

    def cached_on(self, device: Device) -> tuple[CachedRun, ...]:
        """Return what lies on one device."""
        return tuple(each for each in self.cached if each.device == device)

    def _check_cached(self) -> None:
        ends: dict[Device, int] = {}
        for run in self.cached:
            before = ends.get(run.device, 0)
            if not before < run.end <= self.prompt_tokens:
                raise IRError(
                    f"request {self.request_id!r}: a cached run on {run.device} ends at {run.end}; it must be "
                    f"> {before} and <= {self.prompt_tokens}"
                )
            ends[run.device] = run.end


__all__ = ["CachedRun", "Handover", "IRRequest", "Placement", "SharedPrefix"]
