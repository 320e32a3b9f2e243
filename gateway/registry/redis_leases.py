"""The board of leases in Redis or Valkey: a sorted set for how long each holds, hashes for what was said and for how
long it held when it was said.

Its clock is everybody's. A goodbye stays for a minute, so that each gateway gets to read it.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from gateway.registry.lease_board import BoardUnavailableError, Posted
from gateway.state.redis_client import CALL_LIMIT_S, RedisError, redis_client
from kvcontrol.core.ids import InstanceId

GOODBYE_S: Final = 60.0
_KEPT_S: Final = 7200

_POST: Final = f"""
local time = redis.call('TIME')
local said_at = tonumber(time[1]) + tonumber(time[2]) / 1000000 - tonumber(ARGV[4])
local before, held = redis.call('ZSCORE', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[3], ARGV[1])
if before and held and tonumber(before) - tonumber(held) > said_at then return 0 end
redis.call('ZADD', KEYS[1], said_at + tonumber(ARGV[2]), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], {_KEPT_S}) end
return 1
"""

_READ: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], old)
  redis.call('HDEL', KEYS[2], old)
  redis.call('HDEL', KEYS[3], old)
end
local found, said = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), {}
for i = 1, #found, 2 do
  local what = redis.call('HGET', KEYS[2], found[i])
  if what then said[#said + 1] = {found[i], tostring(tonumber(found[i + 1]) - now), what} end
end
return said
"""


class RedisLeaseBoard:
    """One for each process."""

    def __init__(self, url: str, *, prefix: str = "kvgate") -> None:
        self._client = redis_client(url, connections=4)
        self._keys = [f"{prefix}:leases:{{all}}:{what}" for what in ("until", "said", "held")]
        self._post = self._client.register_script(_POST)
        self._read = self._client.register_script(_READ)

    async def post(self, instance: InstanceId, url: str, *, ttl_s: float, age_s: float = 0.0) -> None:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                held_s = ttl_s if url else GOODBYE_S
                await self._post(keys=self._keys, args=[instance, held_s, f"{ttl_s} {url}", age_s])
        except (RedisError, OSError, TimeoutError) as error:
            raise BoardUnavailableError(f"Redis can't be used: {error or type(error).__name__}") from error

    async def read(self) -> Mapping[InstanceId, Posted]:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                found = await self._read(keys=self._keys)
        except (RedisError, OSError, TimeoutError) as error:
            raise BoardUnavailableError(f"Redis can't be used: {error or type(error).__name__}") from error
        posted: dict[InstanceId, Posted] = {}
        for name, left_s, value in found:
            ttl_s, _, url = value.decode().partition(" ")
            posted[InstanceId(name.decode())] = Posted(url=url, ttl_s=float(ttl_s), left_s=float(left_s))
        return posted

    async def close(self) -> None:
        await self._client.aclose()
