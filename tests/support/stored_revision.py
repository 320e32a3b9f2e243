"""The revision of a store."""

from time import time

from gateway.state import Kind, Store
from gateway.state.documents import Revision


async def revision_of(store: Store) -> Revision:
    return (await store.read([Kind.TENANT], time)).revision
