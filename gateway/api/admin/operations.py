"""Operations of operators outside of the store: pending in the store from before they start until they have ended.

Each gateway renews the lease of its operations every second; another gateway undoes those whose lease has expired
(``fleet/rescue.py``). An outcome that the store could not take at once is written later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from gateway.fleet.rescue import LEASE_S
from gateway.fleet.undo_note import UndoNote
from gateway.state import (
    Action,
    OperationLostError,
    Remember,
    Remembered,
    RepeatedKeyError,
    Store,
    StoreUnavailableError,
)

_EVERY_S: Final = 1.0
_CHANGES_POLICIES: Final = frozenset({"swap", "apply"})

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Operation:
    """An operation in progress: the number of its audit entry, and whether the store knows its outcome."""

    number: int
    ended: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    number: int
    action: Action
    remember: Remembered | None


class Operations:
    """The operations of this process. If it dies, other gateways end those that are left."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: set[int] = set()
        self._ends: list[_End] = []

    async def begin(self, action: Action) -> Operation:
        """Begin an operation; raises ``StoreUnavailableError``."""
        operation = Operation(await self._store.begin(action, lease_s=LEASE_S))
        self._open.add(operation.number)
        return operation

    async def note(self, operation: Operation, note: UndoNote) -> None:
        """Write how to undo an operation, before its change is made.

        Raises ``StoreUnavailableError``, ``OperationLostError``.
        """
        await self._store.note(operation.number, note.text(), lease_s=LEASE_S)

    def over(self, operation: Operation) -> None:
        """Note that the store knows the outcome of an operation."""
        operation.ended = True
        self._open.discard(operation.number)

    def keep(self, operation: Operation, action: Action, remember: Remembered | None = None) -> None:
        """Write this outcome, and the answer to its idempotency key, as soon as the store is available."""
        operation.ended = True
        self._ends.append(_End(number=operation.number, action=action, remember=remember))

    def remembered(self, key: str) -> Remembered | None:
        """Return the answer to an idempotency key, if it is not written yet."""
        return next((each.remember for each in self._ends if each.remember and each.remember.key == key), None)

    async def policies_change(self) -> bool:
        """Whether some gateway is changing policies; raises ``StoreUnavailableError``."""
        return any(
            each.action.action in _CHANGES_POLICIES and not each.abandoned for each in await self._store.operations()
        )

    async def write(self) -> None:
        """Write the outcomes that are not in the store yet; raises ``StoreUnavailableError``."""
        while self._ends:
            end = self._ends[0]
            try:
                await self._store.apply([], action=end.action, remember=_remember(end.remember), completes=end.number)
            except RepeatedKeyError:  # another gateway has carried out the same request
                await self._store.apply([], action=end.action, completes=end.number)
            except OperationLostError as error:
                _log.warning(
                    "the result of %s %s was not written to the audit log: %s",
                    end.action.action,
                    end.action.target,
                    error,
                )
            self._ends.remove(end)
            self._open.discard(end.number)

    async def run(self, rescue: Callable[[Collection[int]], Awaitable[None]]) -> None:
        """Renew the leases, write outcomes, and let ``rescue`` undo abandoned operations of others, for ever."""
        while True:
            try:
                if self._open:
                    await self._store.hold(list(self._open), lease_s=LEASE_S)
                await self.write()
                await rescue(frozenset(self._open))
            except StoreUnavailableError as error:
                if self._ends:
                    _log.info(
                        "%d results of operators' changes are not in the audit log yet: %s; they are written later",
                        len(self._ends),
                        error,
                    )
            await asyncio.sleep(_EVERY_S)


def _remember(remembered: Remembered | None) -> Remember | None:
    return None if remembered is None else lambda _: remembered


__all__ = ["Operation", "Operations"]
