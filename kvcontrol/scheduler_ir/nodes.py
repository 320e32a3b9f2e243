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
from math import inf
from typing import NewType, TypeGuard

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import KvControlError
from kvcontrol.core.roles import KVTransport
from kvcontrol.core.shown import MOST_SHOWN, shown

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


MOST_SECONDS = 2**53
"""Integers up to it are times: as floats they are what they were."""
_MOST_CHARS = 1000
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class IRError(KvControlError, ValueError):
    """A node, a graph, a text form or a plan that can't be; the message names the part and what is allowed.

    Of a longer one, which has names of any length in it, the first thousand characters are kept.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]}...")


def is_of(value: object, kind: type) -> bool:
    """Whether a value is of the type that it is annotated with: callers may give any."""
    return isinstance(value, kind)


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is an integer that 64 bits hold; a bool is none."""
    return isinstance(value, int) and value is not True and value is not False and _LEAST <= value <= _MOST


def is_seconds(value: object) -> bool:
    """Whether it is a finite number that a float can hold; a bool is none."""
    if isinstance(value, float):
        return -inf < value < inf
    return is_count(value) and -MOST_SECONDS <= value <= MOST_SECONDS


def _span_problem(start: int, end: int) -> str:
    if is_count(start) and is_count(end) and 0 <= start < end:
        return ""
    return f"tokens [{shown(start)}, {shown(end)}) are none; both are 64-bit integers, 0 <= start < end"


def _batch_problem(batch: int | None) -> str:
    if batch is None or (is_count(batch) and batch >= 0):
        return ""
    return f"batch is {shown(batch)}; it must be a 64-bit integer >= 0, or None"


def _word_problem(name: str, value: object, kind: type[StrEnum]) -> str:
    return "" if isinstance(value, kind) else f"{name} is {shown(value)}; it must be one of {', '.join(kind)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Tokens ``[start, end)`` of a request's prompt, from ``tier``."""

    request: str
    start: int
    end: int
    tier: CacheTier = CacheTier.HBM

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        return _span_problem(self.start, self.end) or _word_problem("tier", self.tier, CacheTier)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tokens ``[start, end)`` of a request's prompt. Nodes of one ``batch`` on one device run as one step."""

    request: str
    start: int
    end: int
    batch: int | None = None

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        return _span_problem(self.start, self.end) or _batch_problem(self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Tokens ``[start, end)``, to the device ``target``, by ``transport``."""

    request: str
    start: int
    end: int
    target: Device
    transport: KVTransport = KVTransport.MIGRATION

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        if not isinstance(self.target, str) or not self.target:
            return f"target is {shown(self.target)}; it must be the name of a device"
        return _span_problem(self.start, self.end) or _word_problem("transport", self.transport, KVTransport)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """Whose pieces become one."""

    request: str

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Up to ``max_tokens`` tokens after a prompt of ``start``. Nodes of one ``batch`` run together."""

    request: str
    start: int
    max_tokens: int
    batch: int | None = None

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        start, most = self.start, self.max_tokens
        if is_count(start) and is_count(most) and start > 0 and most > 0:
            return _batch_problem(self.batch)
        return f"start is {shown(start)}, max_tokens {shown(most)}; both must be 64-bit integers > 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinConfig:
    """How long pieces are to stay after the plan, in seconds."""

    request: str
    ttl_s: float

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        if is_seconds(self.ttl_s) and self.ttl_s > 0:
            return ""
        return f"ttl_s is {shown(self.ttl_s)}; it must be > 0 and finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictConfig:
    """Why memory is given back, in a word; ``keep`` is a tier below in which the tokens stay, None for nowhere."""

    request: str
    reason: str = "done"
    keep: CacheTier | None = None

    def problem(self) -> str:
        """Return what is invalid; empty where nothing is."""
        if self.keep is CacheTier.HBM:
            return "keep is HBM, the evicted tier; allowed: a tier below"
        if not is_of(self.reason, str):
            return f"reason is {shown(self.reason)}; it must be a text"
        return "" if self.keep is None else _word_problem("keep", self.keep, CacheTier)


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

_SHOWN = 8
"""Values that a message names of a node."""
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
        problem = self._shape_problem()
        if problem:  # then it can't be described by what it gives
            raise IRError(f"a node of type {shown(self.node_type)}: {problem}")
        problem = self._arity_problem() or self._config_problem()
        if problem:
            raise IRError(f"{self.describe()}: {problem}")

    def _shape_problem(self) -> str:
        if type(self.node_type) is not NodeType:
            return f"unknown type; allowed: {', '.join(NodeType)}"
        for what, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            if type(values) is not tuple:
                return f"its {what} are {shown(values)}; they must be a tuple of names"
            for value in values:
                if not isinstance(value, str) or not value:
                    return f"its {what} hold {shown(value)}, which is no name"
        return ""

    def _arity_problem(self) -> str:
        least, most, outputs = _ARITIES[self.node_type]
        if not least <= len(self.inputs) <= most:
            allowed = f"{least}" if most == least else f"{least} or more" if most == _MANY else f"{least} to {most}"
            return f"it takes {len(self.inputs)} values; it must take {allowed}"
        return "" if len(self.outputs) == outputs else f"it gives {len(self.outputs)} values; it must give {outputs}"

    def _config_problem(self) -> str:
        config, device = self.config, self.device
        expected = CONFIGS[self.node_type]
        if type(config) is not expected:
            return f"its config is a {type(config).__name__}; it must be a {expected.__name__}"
        if not isinstance(device, str) or not device:
            return f"its device is {shown(device)}; it must be the name of one" if device else "its device is empty"
        if not isinstance(config.request, str) or not config.request:
            return (
                f"its request is {shown(config.request)}; it must be an id"
                if config.request
                else "its request is empty"
            )
        if isinstance(config, TransferConfig) and config.target == device:
            return f"it moves KV from {device[:MOST_SHOWN]} to {device[:MOST_SHOWN]}, where it is already"
        return config.problem()

    def describe(self) -> str:
        """Name this node in a message: ``prefill %fresh``, or ``evict(%a, %b)`` where it gives nothing."""
        if self.outputs:
            return f"{self.node_type} {_named(self.outputs)}"
        return f"{self.node_type}({_named(self.inputs)})"


def _named(values: tuple[ValueName, ...]) -> str:
    more = len(values) - _SHOWN
    return ", ".join(f"%{each[:MOST_SHOWN]}" for each in values[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
