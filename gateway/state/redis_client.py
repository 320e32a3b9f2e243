"""The Redis or Valkey that gateways share. The driver is the optional dependency ``kvgate[redis]``."""

from typing import Any, Final

from gateway.errors import StateError

try:
    import redis as blocking
    import redis.asyncio as redis
    from redis.exceptions import RedisError
except ModuleNotFoundError as error:
    raise StateError("redis_url is set, and the driver is not installed: pip install 'kvgate[redis]'") from error

CALL_LIMIT_S: Final = 5.0


def check_redis(url: str) -> None:
    """Raise ``StateError`` when Redis can't be reached or refuses us; blocks for some seconds at most."""
    try:
        with blocking.Redis.from_url(url, socket_timeout=CALL_LIMIT_S, socket_connect_timeout=CALL_LIMIT_S) as client:
            client.ping()
    except (RedisError, OSError, ValueError) as error:
        raise StateError(f"redis_url: can't be used for quotas: {error or type(error).__name__}") from None


def redis_client(url: str, *, connections: int) -> Any:
    """Return a client with so many connections, none of which is opened yet; the driver has no types to speak of."""
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=CALL_LIMIT_S,
        socket_timeout=CALL_LIMIT_S,
        socket_connect_timeout=CALL_LIMIT_S,
        health_check_interval=30,
    )
    return redis.Redis.from_pool(pool)


__all__ = ["CALL_LIMIT_S", "RedisError", "check_redis", "redis_client"]
