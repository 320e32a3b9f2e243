"""Tenants, quotas and keys in a store, as the admin API would leave them there."""

import json
from pathlib import Path
from typing import Any

from gateway.state import Action, Kind, Put, Store, open_sqlite

_ACTION = Action(actor="test", action="put", target="test")


async def put(state_dir: Path, kind: Kind, name: str, **body: Any) -> None:
    """Write one document into the SQLite store of a state folder."""
    store: Store = open_sqlite(state_dir)
    try:
        await store.apply([Put(kind=kind, name=name, body=json.dumps(body))], action=_ACTION)
    finally:
        await store.close()


__all__ = ["put"]
