"""The Redis or Valkey that gateways share. The driver is the optional dependency ``kvgate[redis]``."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import StateError

try:
    import redis as blocking
    import redis.asyncio as redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError, NoPermissionError, ReadOnlyError, RedisError  # noqa: A004 - its own
except ModuleNotFoundError as error:
    raise StateError("redis_url is set, and the driver is not installed: pip install 'kvgate[redis]'") from error

CALL_LIMIT_S: Final = 5.0
_KEEPS_ALL: Final = "noeviction"

_log = logging.getLogger(__name__)


def check_redis(url: str) -> None:
    """Raise ``StateError`` when Redis can't be reached, refuses us, would evict quotas, or can't be written; blocks for
    some seconds at most.
    """
    try:
        with blocking.Redis.from_url(url, socket_timeout=CALL_LIMIT_S, socket_connect_timeout=CALL_LIMIT_S) as client:
            client.ping()
            _check_fitness(client)
    except (RedisError, OSError, ValueError) as error:
        raise StateError(f"redis_url: can't be used for quotas: {error or type(error).__name__}") from None


def _check_fitness(client: "blocking.Redis") -> None:
    try:
        info: Any = client.info()
    except NoPermissionError:
        _log.warning(
            "redis_url: the INFO command is not allowed, so it is unknown whether Redis evicts quotas; "
            "set maxmemory-policy noeviction"
        )
        return
    if (why := unfit(info)) is not None:
        raise StateError(f"redis_url: {why}")


def unfit(info: Mapping[str, Any]) -> str | None:
    """Return why a Redis with this ``INFO`` can't keep quotas, None where it can."""
    policy = info.get("maxmemory_policy", _KEEPS_ALL)
    if info.get("maxmemory", 0) and policy != _KEEPS_ALL:
        return (
            f"Redis evicts keys when its memory is full (maxmemory-policy {policy}), and quotas would be "
            f"forgotten: set maxmemory-policy {_KEEPS_ALL}, or give kvgate a Redis of its own"
        )
    if info.get("role") == "slave" and info.get("slave_read_only"):
        return "Redis is a read-only replica, and quotas can't be counted there: name the primary"
    return None


def redis_client(url: str, *, connections: int) -> Any:
    """Return a client with so many connections, none of which is opened yet; the driver has hardly any types.

    A command on a dead connection, or on one to a replica that was the primary before, is sent once more on a new
    connection: all commands of kvgate are idempotent.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=CALL_LIMIT_S,
        socket_timeout=CALL_LIMIT_S,
        socket_connect_timeout=CALL_LIMIT_S,
        health_check_interval=30,
        retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError, ReadOnlyError)),
    )
    return redis.Redis.from_pool(pool)


__all__ = ["CALL_LIMIT_S", "NoPermissionError", "RedisError", "check_redis", "redis_client", "unfit"]
