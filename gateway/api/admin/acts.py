"""What operators did outside of the store, and how it ended where the store could not take that at once."""

import asyncio
import logging
from dataclasses import dataclass, field

from gateway.state import Action, Remember, Remembered, RepeatedKeyError, Store, StoreUnavailableError

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


class Unwritten:
    """Ends of acts that are to be written when the store is back; with this process those that are left are gone, and
    their entries stay ``begun``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: list[_End] = []

    def keep(self, act: Act, action: Action, remember: Remembered | None = None) -> None:
        """Write this end, and what was answered to its idempotency key, as soon as that can be done."""
        act.ended = True
        self._ends.append(_End(number=act.number, action=action, remember=remember))

    def remembered(self, key: str) -> Remembered | None:
        """Return what was answered to an idempotency key, if that is not written yet."""
        return next((each.remember for each in self._ends if each.remember and each.remember.key == key), None)

    async def write(self) -> None:
        """Write what is left; raises ``StoreUnavailableError``."""
        while self._ends:
            end = self._ends[0]
            try:
                await self._store.apply([], action=end.action, remember=_said(end.remember), begun=end.number)
            except RepeatedKeyError:  # another gateway has carried out the same request
                await self._store.apply([], action=end.action, begun=end.number)
            self._ends.remove(end)

    async def run(self, interval_s: float) -> None:
        """Write it, for ever."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.write()
            except StoreUnavailableError as error:
                _log.info("%d ends of what operators did are still to be written: %s", len(self._ends), error)


def _said(remembered: Remembered | None) -> Remember | None:
    return None if remembered is None else lambda _: remembered


__all__ = ["Act", "Unwritten"]
