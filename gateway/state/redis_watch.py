"""Checks Redis while the gateway runs: a Redis that is unavailable, or can't keep quotas, is a problem."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from gateway.problems import ProblemKind, Problems
from gateway.state.redis_client import CALL_LIMIT_S, NoPermissionError, RedisError, redis_client, unfit

_EVERY_S: Final = 2.0
_SUBJECT: Final = "redis_url"


class RedisWatch:
    """Checks every two seconds, on a connection of its own: Redis may be restarted with another configuration."""

    def __init__(self, url: str) -> None:
        self._client = redis_client(url, connections=1)

    async def run(self, problems: Problems) -> None:
        """Report the problem while it lasts, for ever."""
        while True:
            wrong = await self._look()
            if wrong is None:
                problems.clear(ProblemKind.REDIS, _SUBJECT)
            else:
                problems.report(ProblemKind.REDIS, _SUBJECT, wrong)
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> str | None:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                wrong = _wrong(await self._client.info())
                if wrong is None:
                    return None
                await self._client.connection_pool.disconnect()  # the address may lead to another server by now
                return _wrong(await self._client.info())
        except NoPermissionError:  # logged at the start
            return None
        except (RedisError, OSError, TimeoutError) as error:
            return (
                f"Redis can't be used: {error or type(error).__name__}; tenants with quotas get 503, and instances "
                "register only at the gateway that they call"
            )

    async def close(self) -> None:
        await self._client.aclose()


def _wrong(info: Mapping[str, Any]) -> str | None:
    if 0 < info.get("maxmemory", 0) <= info.get("used_memory", 0):
        return "the memory of Redis is full: tenants with quotas get 503. Raise its maxmemory, or remove other data"
    return unfit(info)
