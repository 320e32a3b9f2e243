"""What operators do outside of the store: open there from before it is done until it has ended.

Its gateway says every second that it is still there; where it does not, another one undoes it (``fleet/rescue.py``). An
end that the store could not take at once is written later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from gateway.fleet.rescue import LEASE_S
from gateway.fleet.undo_note import UndoNote
from gateway.state import Action, ActLostError, Remember, Remembered, RepeatedKeyError, Store, StoreUnavailableError

_EVERY_S: Final = 1.0
_CHANGES_POLICIES: Final = frozenset({"swap", "apply"})

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Act:
    """Something that is being done: the number of its entry in the audit log, and whether its end is known there."""

    number: int
    ended: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    number: int
    action: Action
    remember: Remembered | None


class Acts:
    """The acts of this process. Where it dies, other gateways end those that are left."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: set[int] = set()
        self._ends: list[_End] = []

    async def begin(self, action: Action) -> Act:
        """Open an act; raises ``StoreUnavailableError``."""
        act = Act(await self._store.begin(action, lease_s=LEASE_S))
        self._open.add(act.number)
        return act

    async def note(self, act: Act, note: UndoNote) -> None:
        """Write what it takes to undo an act, before it is done; raises ``StoreUnavailableError``, ``ActLostError``."""
        await self._store.note(act.number, note.text(), lease_s=LEASE_S)

    def over(self, act: Act) -> None:
        """Note that the store knows the end of an act."""
        act.ended = True
        self._open.discard(act.number)

    def keep(self, act: Act, action: Action, remember: Remembered | None = None) -> None:
        """Write this end, and what was answered to its idempotency key, as soon as that can be done."""
        act.ended = True
        self._ends.append(_End(number=act.number, action=action, remember=remember))

    def remembered(self, key: str) -> Remembered | None:
        """Return what was answered to an idempotency key, if that is not written yet."""
        return next((each.remember for each in self._ends if each.remember and each.remember.key == key), None)

    async def policies_change(self) -> bool:
        """Whether some gateway is in the middle of a change of policies; raises ``StoreUnavailableError``."""
        return any(each.action.action in _CHANGES_POLICIES and not each.abandoned for each in await self._store.acts())

    async def write(self) -> None:
        """Write what is left; raises ``StoreUnavailableError``."""
        while self._ends:
            end = self._ends[0]
            try:
                await self._store.apply([], action=end.action, remember=_said(end.remember), begun=end.number)
            except RepeatedKeyError:  # another gateway has carried out the same request
                await self._store.apply([], action=end.action, begun=end.number)
            except ActLostError as error:
                _log.warning(
                    "the result of %s %s was not written to the audit log: %s",
                    end.action.action,
                    end.action.target,
                    error,
                )
            self._ends.remove(end)
            self._open.discard(end.number)

    async def run(self, rescue: Callable[[Collection[int]], Awaitable[None]]) -> None:
        """Say that they are still there, write ends, and let ``rescue`` see to those of others, for ever."""
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


def _said(remembered: Remembered | None) -> Remember | None:
    return None if remembered is None else lambda _: remembered


__all__ = ["Act", "Acts"]
