"""Operators' calls about an engine's pins: see ``kvcontrol.core.prefix_control``. Each runs between two steps."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from engines.control.calls import CALL_TIMEOUT_S, CallEngine
from engines.control.operation_bodies import block_hashes, parsed
from engines.control.operations import INVALIDATE, PIN, PREFIXES, UNPIN, Operation
from engines.control.pin_book import PinBook
from engines.control.pin_ledger import PIN_BODIES
from kvcontrol.core.prefix_control import InvalidateRequest, PinRequest, Unpinned, UnpinRequest

_Answer = TypeVar("_Answer")


class PinControl:
    """The pin operations of one engine."""

    def __init__(self, pins: PinBook, call: CallEngine) -> None:
        self._pins = pins
        self._call = call

    def table(self) -> dict[bytes, Operation]:
        """Return the operations by name."""
        return {PREFIXES: self._show, PIN: self._pin, UNPIN: self._unpin, INVALIDATE: self._invalidate}

    def _show(self, _: bytes) -> bytes:
        return msgspec.json.encode(self._pins.report())

    def _pin(self, body: bytes) -> bytes:
        request = parsed(body, PinRequest, PIN_BODIES)
        keys = block_hashes(request.hashes)
        self._between_steps(lambda: self._pins.pin(keys, request.ttl_s))
        tip = keys[-1].hex()
        return msgspec.json.encode(next(each for each in self._pins.report().pins if each.hash == tip))

    def _unpin(self, body: bytes) -> bytes:
        [tip] = block_hashes([parsed(body, UnpinRequest, PIN_BODIES).hash], field="hash")
        return msgspec.json.encode(Unpinned(unpinned=self._between_steps(lambda: self._pins.unpin(tip))))

    def _invalidate(self, body: bytes) -> bytes:
        keys = block_hashes(parsed(body, InvalidateRequest, PIN_BODIES).hashes)
        return msgspec.json.encode(self._between_steps(lambda: self._pins.invalidate(keys)))

    def _between_steps(self, work: Callable[[], _Answer]) -> _Answer:
        return self._call(work, timeout_s=CALL_TIMEOUT_S)
