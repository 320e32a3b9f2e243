"""What operators may ask of an engine's pins: see ``kvcontrol.core.prefix_control``. Each runs between two steps."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from engines.control.operation_bodies import block_hashes, parsed
from engines.control.pin_ledger import PIN_BODIES
from engines.events.publisher import EventPublisher, Operation
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.trie.pins import PinBook
from kvcontrol.core.prefix_control import InvalidateRequest, PinRequest, Unpinned, UnpinRequest

PREFIXES = b"prefixes"
PIN = b"pin"
UNPIN = b"unpin"
INVALIDATE = b"invalidate"

_CALL_TIMEOUT_S = 1.5
"""Less than the api_server waits: a busy engine is told as busy."""
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
        request = parsed(body, PinRequest, PIN_BODIES)
        keys = block_hashes(request.hashes)
        self._between_steps(lambda: self._pins.pin(keys, request.ttl_s))
        tip = keys[-1].hex()
        return msgspec.json.encode(next(each for each in self._pins.report().pins if each.hash == tip))

    def _unpin(self, _: EventPublisher, body: bytes) -> bytes:
        [tip] = block_hashes([parsed(body, UnpinRequest, PIN_BODIES).hash], field="hash")
        return msgspec.json.encode(Unpinned(unpinned=self._between_steps(lambda: self._pins.unpin(tip))))

    def _invalidate(self, _: EventPublisher, body: bytes) -> bytes:
        keys = block_hashes(parsed(body, InvalidateRequest, PIN_BODIES).hashes)
        return msgspec.json.encode(self._between_steps(lambda: self._pins.invalidate(keys)))

    def _between_steps(self, work: Callable[[], _Answer]) -> _Answer:
        return self._calls(work, timeout_s=_CALL_TIMEOUT_S)


__all__ = ["INVALIDATE", "PIN", "PREFIXES", "UNPIN", "PinOperations"]
