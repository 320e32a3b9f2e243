"""What operators may ask of an engine's pins: see ``kvcontrol.core.prefix_control``. Each runs between two steps."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from engines.event_publisher import EventPublisher, Operation
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.operation_bodies import block_hashes, parsed
from engines.lmdeploy.pins import PinBook
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.prefix_control import LONGEST_TTL_S, InvalidateRequest, PinRequest, Unpinned, UnpinRequest
from kvcontrol.core.tier_control import MOST_BLOCKS

PREFIXES = b"prefixes"
PIN = b"pin"
UNPIN = b"unpin"
INVALIDATE = b"invalidate"

_CALL_TIMEOUT_S = 1.5
"""Less than the api_server waits: a busy engine is told as busy."""
_HASHES = f"hashes (1 to {MOST_BLOCKS} names of blocks in prompt order, {2 * HASH_BYTES} hex digits each)"
_ALLOWED: Mapping[type, str] = {
    PinRequest: f"{_HASHES} and ttl_s (null, or above 0 to {LONGEST_TTL_S:g} seconds)",
    UnpinRequest: f"hash (what a pin is called: {2 * HASH_BYTES} hex digits)",
    InvalidateRequest: _HASHES,
}

_Answer = TypeVar("_Answer")


class PinOperations:
    """The operations of one engine."""

    def __init__(self, pins: PinBook, calls: EngineCalls) -> None:
        self._pins = pins
        self._calls = calls

    def table(self) -> dict[bytes, Operation]:
        """Return all of them by name."""
        return {PREFIXES: self._show, PIN: self._pin, UNPIN: self._unpin, INVALIDATE: self._invalidate}

    def _show(self, _: EventPublisher, body: bytes) -> bytes:
        del body
        return msgspec.json.encode(self._pins.report())

    def _pin(self, _: EventPublisher, body: bytes) -> bytes:
        request = parsed(body, PinRequest, _ALLOWED)
        keys = block_hashes(request.hashes)
        self._between_steps(lambda: self._pins.pin(keys, request.ttl_s))
        tip = keys[-1].hex()
        return msgspec.json.encode(next(each for each in self._pins.report().pins if each.hash == tip))

    def _unpin(self, _: EventPublisher, body: bytes) -> bytes:
        [tip] = block_hashes([parsed(body, UnpinRequest, _ALLOWED).hash], field="hash")
        return msgspec.json.encode(Unpinned(unpinned=self._between_steps(lambda: self._pins.unpin(tip))))

    def _invalidate(self, _: EventPublisher, body: bytes) -> bytes:
        keys = block_hashes(parsed(body, InvalidateRequest, _ALLOWED).hashes)
        return msgspec.json.encode(self._between_steps(lambda: self._pins.invalidate(keys)))

    def _between_steps(self, work: Callable[[], _Answer]) -> _Answer:
        return self._calls(work, timeout_s=_CALL_TIMEOUT_S)


__all__ = ["INVALIDATE", "PIN", "PREFIXES", "UNPIN", "PinOperations"]
