"""Quotas that all workers and replicas share, in Redis or Valkey.

Each decision is one Lua script, which nothing runs beside: as exact as in one process. Redis' clock is everybody's.
A reservation carries its own number and counts once, however often it is sent.
What is kept of a tenant goes by itself a minute or two after its last request.

A place of the concurrency is a lease: it is renewed while its request runs, so a gateway that is killed gives its
places back within ``LEASE_S``. Settlements are written in the background, in order, tried again while Redis is
away, and given up once they no longer matter (the window has passed).
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from time import monotonic
from typing import Any, Final

from gateway.admission.quota import (
    Demand,
    Dimension,
    Exceeded,
    Granted,
    QuotaUnavailableError,
    QuotaUsage,
    Reservation,
    Standing,
    standing,
)
from gateway.admission.window import WINDOW_S
from gateway.limits import TenantLimits
from gateway.state.redis_client import CALL_LIMIT_S, RedisError, redis_client
from gateway.types import TenantId

LEASE_S: Final = 30.0
_RENEW_S: Final = 10.0
_RETRY_S: Final = 0.5
_KEPT_S: Final = WINDOW_S * 2
_MOST_UNSETTLED: Final = 100_000
_BATCH: Final = 256
_CONNECTIONS: Final = 32

_COMMON: Final = """
local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local now = redis.call('TIME')
  return tonumber(now[1]) + tonumber(now[2]) / 1000000
end
-- What counts now, the newest slot that counts (0: none), and the slots themselves; older ones are let go.
local function window(key, now)
  local fields = redis.call('HGETALL', key)
  local oldest = math.floor(now) - @WINDOW@
  local used, newest, slots = 0, 0, {}
  for i = 1, #fields, 2 do
    local slot, count = tonumber(fields[i]), tonumber(fields[i + 1])
    if slot <= oldest then
      redis.call('HDEL', key, fields[i])
    else
      used = used + count
      if count ~= 0 and slot > newest then newest = slot end
      slots[#slots + 1] = {slot, count}
    end
  end
  return used, newest, slots
end
local function running(key, now)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  return redis.call('ZCARD', key)
end
-- A reservation's places: the first has its number for a name, the others that and a number of their own.
local function name(number, place)
  if place == 1 then return number end
  return number .. ':' .. place
end
local function give_back(number, places)
  for place = 1, places do redis.call('ZREM', KEYS[3], name(number, place)) end
end
local function correct(slot, requests, tokens)
  if redis.call('HEXISTS', KEYS[1], slot) == 1 then redis.call('HINCRBY', KEYS[1], slot, requests) end
  if redis.call('HEXISTS', KEYS[2], slot) == 1 then redis.call('HINCRBY', KEYS[2], slot, tokens) end
end
"""

_RESERVE: Final = (
    _COMMON
    + """
local limits = {tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])}
local requests, tokens, places = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local number, lease = ARGV[8], tonumber(ARGV[9])
local now = clock()
if ARGV[10] ~= '' and redis.call('ZSCORE', KEYS[3], ARGV[10]) then
  give_back(ARGV[10], tonumber(ARGV[14]))
  correct(tonumber(ARGV[11]), 0 - tonumber(ARGV[12]), 0 - tonumber(ARGV[13]))
end
local used_r, newest_r, slots_r = window(KEYS[1], now)
local used_t, newest_t, slots_t = window(KEYS[2], now)
local known = redis.call('ZSCORE', KEYS[3], number)
if known then
  return {1, math.floor(tonumber(known) - lease), '', used_r, newest_r, used_t, newest_t, tostring(now)}
end
local function room_in(used, slots, amount, limit)
  local excess = used + amount - limit
  if limit < 0 or excess <= 0 then return nil end
  table.sort(slots, function(a, b) return a[1] < b[1] end)
  for _, each in ipairs(slots) do
    excess = excess - each[2]
    if excess <= 0 then return each[1] + @WINDOW@ - now end
  end
  return @WINDOW@
end
local function refuse(which, wait)
  return {0, which, tostring(wait), used_r, newest_r, used_t, newest_t, tostring(now)}
end
local wait = room_in(used_r, slots_r, requests, limits[1])
if wait then return refuse(1, wait) end
wait = room_in(used_t, slots_t, tokens, limits[2])
if wait then return refuse(2, wait) end
if limits[3] >= 0 and running(KEYS[3], now) + places > limits[3] then return refuse(3, 1) end
local slot = math.floor(now)
redis.call('HINCRBY', KEYS[1], slot, requests)
redis.call('HINCRBY', KEYS[2], slot, tokens)
for place = 1, places do redis.call('ZADD', KEYS[3], now + lease, name(number, place)) end
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], @KEPT@) end
return {1, slot, '', used_r + requests, slot, used_t + tokens, slot, tostring(now)}
"""
)

_SETTLE: Final = (
    _COMMON
    + """
local score = redis.call('ZSCORE', KEYS[3], ARGV[2])
if not score then return 0 end
give_back(ARGV[2], tonumber(ARGV[6]))
local slot = tonumber(ARGV[1])
if slot < 0 then slot = math.floor(tonumber(score) - tonumber(ARGV[5])) end
correct(slot, tonumber(ARGV[3]), tonumber(ARGV[4]))
return 1
"""
)
"""The first place is what makes it happen once, however often it is sent. A slot below 0 means the time of the
reservation.
"""

_RENEW: Final = (
    _COMMON
    + """
local now = clock()
for i = 3, #ARGV, 2 do
  for place = 1, tonumber(ARGV[i + 1]) do
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), name(ARGV[i], place))
  end
end
redis.call('EXPIRE', KEYS[1], @KEPT@)
return 1
"""
)

_USAGE: Final = (
    _COMMON
    + """
local now = clock()
local used_r = window(KEYS[1], now)
local used_t = window(KEYS[2], now)
return {used_r, used_t, running(KEYS[3], now)}
"""
)

_DIMENSIONS: Final = (Dimension.REQUESTS, Dimension.TOKENS, Dimension.CONCURRENCY)


def _filled(script: str) -> str:
    return script.replace("@WINDOW@", str(WINDOW_S + 1)).replace("@KEPT@", str(_KEPT_S))


class RedisQuotaMeter:
    """One for each process. ``clock`` is for tests; None is Redis' own."""

    def __init__(self, url: str, *, prefix: str = "kvgate", clock: Callable[[], float] | None = None) -> None:
        self._client = redis_client(url, connections=_CONNECTIONS)
        self._prefix = prefix
        self._clock = clock
        self._reserve = self._client.register_script(_filled(_RESERVE))
        self._settle = self._client.register_script(_filled(_SETTLE))
        self._renew = self._client.register_script(_filled(_RENEW))
        self._usage = self._client.register_script(_filled(_USAGE))
        self._held: dict[str, Reservation] = {}
        self._ended: deque[tuple[Reservation, int, int, float]] = deque(maxlen=_MOST_UNSETTLED)
        self._ended_some = asyncio.Event()
        self._log = logging.getLogger(__name__)

    async def reserve(
        self, tenant: TenantId, limits: TenantLimits, demand: Demand, *, instead_of: Reservation | None = None
    ) -> Granted | Exceeded:
        number = uuid.uuid4().hex
        bounds = (limits.requests_per_min, limits.tokens_per_min, limits.concurrency)
        earlier: tuple[str | int, ...] = ("", 0, 0, 0, 0)
        if instead_of is not None:
            self._held.pop(instead_of.number, None)
            earlier = (instead_of.number, instead_of.slot, *instead_of.demand)
        try:
            reply = await self._call(
                self._reserve,
                tenant,
                [*(-1 if each is None else each for each in bounds), *demand, number, LEASE_S, *earlier],
            )
        except BaseException:
            # Whether it was taken is unknown, so it is given back if it is there; and so is the earlier one.
            self.settle(Reservation(tenant=tenant, demand=demand, number=number, slot=-1), requests=0, tokens=0)
            if instead_of is not None:
                self.settle(instead_of, requests=0, tokens=0)
            raise
        granted, which, wait, used_r, newest_r, used_t, newest_t, now = reply
        now_s = float(now)
        standings = _standings(limits, {"r": (used_r, newest_r), "t": (used_t, newest_t)}, now_s)
        if not granted:
            dimension = _DIMENSIONS[which - 1]
            limit = bounds[which - 1]
            return Exceeded(
                dimension=dimension,
                limit=limit or 0,
                retry_after_s=max(1, ceil(float(wait))),
                requests=standings[0],
                tokens=standings[1],
            )
        reservation = Reservation(tenant=tenant, demand=demand, number=number, slot=which)
        self._held[number] = reservation
        return Granted(reservation=reservation, requests=standings[0], tokens=standings[1])

    def settle(self, reservation: Reservation, *, requests: int, tokens: int) -> None:
        self._held.pop(reservation.number, None)
        self._end(reservation, requests - reservation.demand.requests, tokens - reservation.demand.tokens)

    async def usage(self, tenant: TenantId) -> QuotaUsage:
        requests, tokens, running = await self._call(self._usage, tenant, [])
        return QuotaUsage(requests=requests, tokens=tokens, running=running)

    async def run(self) -> None:
        """Write settlements as they come, and renew leases every ten seconds; for ever."""
        renewed_s = monotonic()
        while True:
            try:
                async with asyncio.timeout(max(0.0, renewed_s + _RENEW_S - monotonic())):
                    await self._ended_some.wait()
            except TimeoutError:
                renewed_s = monotonic()
                await self._renew_all()
            await self.flush()

    async def flush(self) -> None:
        """Write the settled costs; some are left when Redis is unavailable."""
        self._ended_some.clear()
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(_BATCH, len(self._ended)))]
            try:
                async with asyncio.timeout(CALL_LIMIT_S), self._client.pipeline(transaction=False) as pipe:
                    for reservation, requests, tokens, _ in batch:
                        await self._settle(
                            keys=self._keys(reservation.tenant),
                            args=[
                                reservation.slot,
                                reservation.number,
                                requests,
                                tokens,
                                LEASE_S,
                                reservation.demand.places,
                            ],
                            client=pipe,
                        )
                    await pipe.execute()
            except (RedisError, OSError, TimeoutError) as error:
                self._later(batch)
                self._log.warning("settled quotas can't be written now: %s", error or type(error).__name__)
                await asyncio.sleep(_RETRY_S)
                self._ended_some.set()
                return
            except asyncio.CancelledError:
                self._later(batch)
                raise

    def _later(self, batch: list[tuple[Reservation, int, int, float]]) -> None:
        """Keep what could not be written for the next time, but for what no longer matters."""
        since_s = monotonic() - _KEPT_S
        self._ended.extendleft(each for each in reversed(batch) if each[3] > since_s)

    async def close(self) -> None:
        """Write the remaining costs, if Redis is available, and close the connections."""
        await self.flush()
        await self._client.aclose()

    async def _renew_all(self) -> None:
        by_tenant: dict[TenantId, list[str | int]] = {}
        for number, held in self._held.items():
            by_tenant.setdefault(held.tenant, []).extend((number, held.demand.places))
        for tenant, places in by_tenant.items():
            try:
                async with asyncio.timeout(CALL_LIMIT_S):
                    await self._renew(keys=[self._keys(tenant)[2]], args=[self._now(), LEASE_S, *places])
            except (RedisError, OSError, TimeoutError) as error:
                self._log.warning("quota leases can't be renewed now: %s", error or type(error).__name__)
                return

    def _end(self, reservation: Reservation, requests: int, tokens: int) -> None:
        self._ended.append((reservation, requests, tokens, monotonic()))
        self._ended_some.set()

    async def _call(self, script: Any, tenant: TenantId, arguments: list[Any]) -> Any:
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                return await script(keys=self._keys(tenant), args=[self._now(), *arguments])
        except (RedisError, OSError, TimeoutError) as error:
            raise QuotaUnavailableError(f"Redis can't be used: {error or type(error).__name__}") from error

    def _now(self) -> str:
        return "" if self._clock is None else repr(self._clock())

    def _keys(self, tenant: TenantId) -> list[str]:
        """Return a tenant's keys; the braces keep them on one node of a cluster."""
        return [f"{self._prefix}:quota:{{{tenant}}}:{what}" for what in ("requests", "tokens", "running")]


def _standings(
    limits: TenantLimits, used: Mapping[str, tuple[int, int]], now_s: float
) -> tuple[Standing | None, Standing | None]:
    def of(limit: int | None, which: str) -> Standing | None:
        count, newest = used[which]
        return standing(limit, count, newest + WINDOW_S + 1 - now_s if count else 0.0)

    return of(limits.requests_per_min, "r"), of(limits.tokens_per_min, "t")
