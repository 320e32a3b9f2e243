"""The steps that serving a request is made of, as values.

A value (``%name``) is either a *piece*, the KV of tokens ``[start, end)`` of one request on one device, or an *answer*.
A node takes pieces and gives pieces or an answer; each value is given by exactly one node:

    load       0 or 1 piece   -> piece          KV that is there: in a tier, or in another request's piece (shared)
    prefill    what precedes  -> piece          computes tokens [start, end); its inputs cover [0, start)
    transfer   1 piece        -> piece          the same tokens on ``target``; ``device`` is where they come from
    join       2+ pieces      -> piece          adjacent pieces as one; they are used up
    decode     the prompt     -> answer, piece  its inputs cover [0, start); the piece is the answer's own KV
    pin        1+ pieces      ->                they stay after the plan, for ``ttl_s``
    evict      1+ pieces      ->                their memory is given back; ``keep`` names a tier they stay in

``join`` and ``evict`` use up what they take: they come after everything else that takes the same piece.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import KvControlError
from kvcontrol.core.roles import KVTransport

ValueName = NewType("ValueName", str)
"""Names a piece or an answer within one graph; without the ``%`` of the text form."""

Device = NewType("Device", str)
"""Where KV lies and steps run: an instance, by its id."""


class NodeType(StrEnum):
    """The kinds of steps; the value is the word of the text form."""

    LOAD = "load"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    JOIN = "join"
    DECODE = "decode"
    PIN = "pin"
    EVICT = "evict"


class IRError(KvControlError, ValueError):
    """A node, a graph, a text form or a plan that can't be; the message names the part and what is allowed."""


def _span_problem(start: int, end: int) -> str:
    return "" if 0 <= start < end else f"tokens [{start}, {end}) are none; 0 <= start < end"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Tokens ``[start, end)`` of a request's prompt, from ``tier``."""

    request: str
    start: int
    end: int
    tier: CacheTier = CacheTier.HBM

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return _span_problem(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tokens ``[start, end)`` of a request's prompt. Nodes of one ``batch`` on one device run as one step."""

    request: str
    start: int
    end: int
    batch: int | None = None

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return _span_problem(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Tokens ``[start, end)``, to the device ``target``, by ``transport``."""

    request: str
    start: int
    end: int
    target: Device
    transport: KVTransport = KVTransport.MIGRATION

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return _span_problem(self.start, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """Whose pieces become one."""

    request: str

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Up to ``max_tokens`` tokens after a prompt of ``start``. Nodes of one ``batch`` run together."""

    request: str
    start: int
    max_tokens: int
    batch: int | None = None

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        if self.start > 0 and self.max_tokens > 0:
            return ""
        return f"start is {self.start}, max_tokens {self.max_tokens}; both must be > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinConfig:
    """How long pieces are to stay after the plan, in seconds."""

    request: str
    ttl_s: float

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return "" if 0 < self.ttl_s < float("inf") else f"ttl_s is {self.ttl_s}; it must be > 0 and finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictConfig:
    """Why memory is given back, in a word; ``keep`` is a tier below in which the tokens stay, None for nowhere."""

    request: str
    reason: str = "done"
    keep: CacheTier | None = None

    def problem(self) -> str:
        """Say what can't be; empty when all can."""
        return "keep is HBM, which is what it leaves; it must be a tier below" if self.keep is CacheTier.HBM else ""


NodeConfig = LoadConfig | PrefillConfig | TransferConfig | JoinConfig | DecodeConfig | PinConfig | EvictConfig

CONFIGS: dict[NodeType, type[NodeConfig]] = {
    NodeType.LOAD: LoadConfig,
    NodeType.PREFILL: PrefillConfig,
    NodeType.TRANSFER: TransferConfig,
    NodeType.JOIN: JoinConfig,
    NodeType.DECODE: DecodeConfig,
    NodeType.PIN: PinConfig,
    NodeType.EVICT: EvictConfig,
}
"""Which configuration each kind of node has."""

CONSUMING = frozenset({NodeType.JOIN, NodeType.EVICT})
"""Nodes that use up what they take."""

_MANY = 1 << 30
_ARITIES: dict[NodeType, tuple[int, int, int]] = {
    NodeType.LOAD: (0, 1, 1),
    NodeType.PREFILL: (0, _MANY, 1),
    NodeType.TRANSFER: (1, 1, 1),
    NodeType.JOIN: (2, _MANY, 1),
    NodeType.DECODE: (1, _MANY, 2),
    NodeType.PIN: (1, _MANY, 0),
    NodeType.EVICT: (1, _MANY, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IRNode:
    """One step. ``check`` is called for every node that enters a graph."""

    node_type: NodeType
    inputs: tuple[ValueName, ...]
    outputs: tuple[ValueName, ...]
    config: NodeConfig
    device: Device

    @property
    def request(self) -> str:
        return self.config.request

    def check(self) -> None:
        """Raise ``IRError`` when the parts of this node don't fit each other."""
        what = self.describe()
        expected = CONFIGS[self.node_type]
        if type(self.config) is not expected:
            raise IRError(f"{what}: its config is a {type(self.config).__name__}; it must be a {expected.__name__}")
        least, most, outputs = _ARITIES[self.node_type]
        if not least <= len(self.inputs) <= most:
            allowed = f"{least}" if most == least else f"{least} or more" if most == _MANY else f"{least} to {most}"
            raise IRError(f"{what}: it takes {len(self.inputs)} values; it must take {allowed}")
        if len(self.outputs) != outputs:
            raise IRError(f"{what}: it gives {len(self.outputs)} values; it must give {outputs}")
        if not self.device:
            raise IRError(f"{what}: its device is empty")
        problem = self.config.problem() if self.config.request else "its request is empty"
        if problem:
            raise IRError(f"{what}: {problem}")

    def describe(self) -> str:
        """Name this node in a message: ``prefill %fresh``, or ``evict(%a, %b)`` where it gives nothing."""
        if self.outputs:
            return f"{self.node_type} " + ", ".join(f"%{each}" for each in self.outputs)
        return f"{self.node_type}(" + ", ".join(f"%{each}" for each in self.inputs) + ")"


__all__ = [
    "CONFIGS",
    "CONSUMING",
    "DecodeConfig",
    "Device",
    "EvictConfig",
    "IRError",
    "IRNode",
    "JoinConfig",
    "LoadConfig",
    "NodeConfig",
    "NodeType",
    "PinConfig",
    "PrefillConfig",
    "TransferConfig",
    "ValueName",
]
