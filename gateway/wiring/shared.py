"""Constructs what several gateways share: the durable store, quotas, and leases.

Redis and PostgreSQL come with optional drivers, so their modules are imported only where they are used.
"""

from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission import LocalQuotaMeter, QuotaMeter
from gateway.registry.lease_board import LeaseBoard, NoBoard
from gateway.settings.state import StateSettings
from gateway.state import AuditBound, Store, open_sqlite

if TYPE_CHECKING:
    from gateway.state.redis_watch import RedisWatch

_DAY_S = 86_400.0


class Shared(NamedTuple):
    """Close it when nobody uses it any more."""

    store: Store
    quotas: QuotaMeter
    board: LeaseBoard
    redis: "RedisWatch | None" = None

    async def close(self) -> None:
        if self.redis is not None:
            await self.redis.close()
        await self.board.close()
        await self.quotas.close()
        await self.store.close()


def open_shared(state: StateSettings) -> Shared:
    """Open them; raises ``StateError`` for what can't be used."""
    store = _store(state)
    if state.redis_url is None:
        return Shared(store, LocalQuotaMeter(monotonic), NoBoard())
    from gateway.admission.redis_quota import RedisQuotaMeter
    from gateway.registry.redis_leases import RedisLeaseBoard
    from gateway.state.redis_client import check_redis
    from gateway.state.redis_watch import RedisWatch

    url = state.redis_url.get_secret_value()
    check_redis(url)
    return Shared(store, RedisQuotaMeter(url), RedisLeaseBoard(url), RedisWatch(url))


def _store(state: StateSettings) -> Store:
    audit = AuditBound(entries=state.audit_entries, age_s=state.audit_days * _DAY_S)
    if state.store_url is None:
        return open_sqlite(state.state_dir, audit, limit_s=state.store_timeout_s)
    from gateway.state.postgres import open_postgres

    return open_postgres(state.store_url.get_secret_value(), audit, limit_s=state.store_timeout_s)
