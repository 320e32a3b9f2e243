"""Whether a prompt is computed where it is answered or elsewhere: a decision with its reason.

Separation keeps long prompts from interrupting running answers; it costs a transfer. So it is left alone where little
is to be computed: short prompts, and those that the answering side already holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvcontrol.core.roles import KVTransport
from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.nodes import Device, IRError, is_count
from kvcontrol.scheduler_ir.request import Handover, Placement


class SplitReason(StrEnum):
    """Why a prompt is computed where it is."""

    SEPARATED = "separated"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    UNKNOWN_PROMPT = "unknown_prompt"
    HELD = "held"  # the answering side has so much of it that little is left to compute
    SHORT = "short"
    NO_TRANSPORT = "no_transport"
    PREFILL_BUSY = "prefill_busy"  # every prefill instance is at its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLimits:
    """What one phase may have at one instance at once: ``requests``, and ``tokens`` of prompts that are being computed.
    0 is no limit. A prompt longer than ``tokens`` may go to an instance that computes nothing. Raises ``IRError`` for
    less than 0.
    """

    requests: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in (("requests", self.requests), ("tokens", self.tokens)):
            if not is_count(value) or value < 0:
                raise IRError(f"{name} is {shown(value)}; it must be a 64-bit integer >= 0, 0 is no limit")

    def admits(self, side: "Side", tokens: int) -> bool:
        """Whether an instance may be given a request with so many tokens to compute."""
        if self.requests and side.requests >= self.requests:
            return False
        return not self.tokens or not side.computing_tokens or side.computing_tokens + tokens <= self.tokens


class Side(NamedTuple):
    """An instance that could compute or answer a prompt: how much of it it holds, in whatever tier, what it has to do
    already in the phase asked about, and how it can hand KV over. Two sides reach each other by a transport when both
    name the same ``domains`` entry for it.

    A tuple, as one is made of each prefill instance for each request.
    """

    device: Device
    held_tokens: int = 0
    requests: int = 0
    computing_tokens: int = 0
    domains: Mapping[KVTransport, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The decision. ``uncached_tokens`` are those that the prefill will compute (None: the prompt is unknown)."""

    placement: Placement
    reason: SplitReason
    uncached_tokens: int | None


class PDSeparator(Protocol):
    """A pure function: the same question gives the same answer."""

    def split(self, prompt_tokens: int | None, answer: Side, prefills: Sequence[Side]) -> Split:
        """Say where a prompt that ``answer`` will answer is computed; ``prompt_tokens`` is None for an unknown one."""
        ...


class HybridOnly:
    """The simplest separator: it never separates."""

    def split(self, prompt_tokens: int | None, answer: Side, prefills: Sequence[Side]) -> Split:
        del prefills
        uncached = None if prompt_tokens is None else max(0, prompt_tokens - answer.held_tokens)
        return Split(
            placement=Placement(answer=answer.device), reason=SplitReason.NO_PREFILL_INSTANCE, uncached_tokens=uncached
        )


class ThresholdSeparator:
    """Separates from ``min_uncached_tokens`` on: tokens of the prompt that the answering side doesn't hold.

    Among prefill instances that reach it and are within ``limits``, the one with least to compute, its own work
    included, is chosen; of equal ones that with fewest requests, then by name. ``transports`` are tried in their order.
    """

    def __init__(
        self,
        *,
        min_uncached_tokens: int,
        limits: PhaseLimits = PhaseLimits(),
        transports: Sequence[KVTransport] = tuple(KVTransport),
    ) -> None:
        if not is_count(min_uncached_tokens) or min_uncached_tokens < 0:
            raise IRError(f"min_uncached_tokens is {shown(min_uncached_tokens)}; it must be a 64-bit integer >= 0")
        self._min_uncached = min_uncached_tokens
        self._limits = limits
        self._is_free = not limits.requests and not limits.tokens
        self._transports = tuple(transports)

    def split(self, prompt_tokens: int | None, answer: Side, prefills: Sequence[Side]) -> Split:
        """See ``PDSeparator``. O(prefill instances)."""
        here = Placement(answer=answer.device)
        if prompt_tokens is None:
            reason = SplitReason.UNKNOWN_PROMPT if prefills else SplitReason.NO_PREFILL_INSTANCE
            return Split(placement=here, reason=reason, uncached_tokens=None)
        uncached = max(0, prompt_tokens - answer.held_tokens)
        if not prefills:
            return Split(placement=here, reason=SplitReason.NO_PREFILL_INSTANCE, uncached_tokens=uncached)
        if uncached < self._min_uncached:
            reason = SplitReason.SHORT if prompt_tokens < self._min_uncached else SplitReason.HELD
            return Split(placement=here, reason=reason, uncached_tokens=uncached)
        free = []
        reaches = False
        domains: Mapping[KVTransport, str] | None = None  # most have the same
        way: KVTransport | None = None
        for each in prefills:
            if each.domains != domains:
                domains = each.domains
                way = self._way(domains, answer.domains)
            if way is None or each.device == answer.device:
                continue
            reaches = True
            to_compute = max(0, prompt_tokens - each.held_tokens)
            if self._is_free or self._limits.admits(each, to_compute):  # no two are equal up to the device's name
                free.append((to_compute + each.computing_tokens, each.requests, each.device, to_compute, way))
        if not free:
            reason = SplitReason.PREFILL_BUSY if reaches else SplitReason.NO_TRANSPORT
            return Split(placement=here, reason=reason, uncached_tokens=uncached)
        _, _, chosen, to_compute, way = min(free)
        return Split(
            placement=Placement(answer=answer.device, handover=Handover(prefill=chosen, transport=way)),
            reason=SplitReason.SEPARATED,
            uncached_tokens=to_compute,
        )

    def _way(self, prefill: Mapping[KVTransport, str], answer: Mapping[KVTransport, str]) -> KVTransport | None:
        """The first transport by which a side with some domains reaches one with others; None when there is none."""
        for transport in self._transports:
            domain = prefill.get(transport)
            if domain is not None and domain == answer.get(transport):
                return transport
        return None
