"""Removes expired pins from the store, with an entry in the audit log."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from gateway.state import Action, ConflictError, Delete, Kind, Store, StoreUnavailableError

_log = logging.getLogger(__name__)


class PinExpiry:
    """The first of several gateways removes a pin; ``refresh`` applies that in this process."""

    def __init__(self, store: Store, refresh: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._refresh = refresh

    async def __call__(self, names: Sequence[str]) -> None:
        """Remove these pins, except those that change meanwhile. An unavailable store is logged, not raised."""
        try:
            for name in names:
                await self._remove(name)
            await self._refresh()
        except StoreUnavailableError as error:
            _log.warning("expired pins stay in the store for now: %s", error)

    async def _remove(self, name: str) -> None:
        present = await self._store.document(Kind.PIN, name)
        if present is None:
            return
        try:
            await self._store.apply(
                [Delete(kind=Kind.PIN, name=name, expected=present.version)],
                action=Action(actor="gateway", action="expire", target=f"prefixes/{name}"),
            )
        except ConflictError:
            _log.info("pin %s was changed while it expired; it stays", name)
