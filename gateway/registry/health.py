"""Health checks: one loop for each instance reads its health, models and cache state.

Each check asks for ``/health`` (a 404 there is an engine that has none: the model list decides) and ``/kv/v1/stats``,
and every 15 s for ``/v1/models``. An engine without ``/kv/v1`` is healthy all the same and is routed by what it was
sent; it is asked for its stats again every 15 s. An engine that used to report and no longer does has failed the check:
its HTTP server answers for an engine process that is stuck, long before ``/health`` says so.

A busy instance misses a check now and then; its last report stands until it missed several in a row. An instance that
began to answer a request while it kept a check waiting has missed none. Nor has one whose check took long because this
process was late itself.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any

import httpx2
import msgspec

from gateway.http.client import FETCH_ERRORS, fetch
from gateway.http.connect_failure import connect_failure_reason, is_own_fault
from gateway.registry.addresses import AddressRules
from gateway.registry.instance import InstanceState, Model, ProbeResult, Source
from gateway.registry.load import LoadTracker
from gateway.registry.registry import Registry
from gateway.registry.report import ReportError, read_report
from kvcontrol.core.control import STATS_PATH, InstanceStats
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId

_SELDOM_S = 15.0
"""Pause between two looks at what seldom changes: the models, and that an engine has no ``/kv/v1``."""
_NO_KV = "healthy; it serves no /kv/v1, so its residency is learned from routed requests"
_MAX_ANSWER_BYTES = 4 << 20
_LEAST_PAUSE_SHARE = 0.1
_MOST_OWN_SHARE = 0.5
"""Share of a check's time by which this process itself may have been late, for a late answer to be the instance's."""


class _ModelCard(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[msgspec.Raw]


def _tiers_problem(stats: InstanceStats) -> str | None:
    """Say that an instance serves and that its tiers keep nothing, None where they do."""
    failure = "" if stats.offload is None else stats.offload.save_failure
    return f"healthy; its tiers keep nothing: {failure}" if failure else None


class _CheckFailedError(Exception):
    """The instance answered, and not well."""


class HealthLoop:
    """Checks one instance for ever, every ``interval_s``; each check takes at most ``timeout_s``.

    A check that takes longer than the interval is followed by the next one almost at once: slow failures are counted as
    fast as they come.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        instance: InstanceId,
        *,
        registry: Registry,
        load: LoadTracker,
        client: httpx2.AsyncClient,
        interval_s: float,
        timeout_s: float,
        rules: AddressRules | None = None,
        lag_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``lag_s`` is for how long in all this process has been late to look at what came."""
        self._instance = instance
        self._registry = registry
        self._load = load
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._rules = rules or AddressRules()
        self._lag_s = lag_s
        self._reports = False
        self._kv = False
        self._models: tuple[Model, ...] = ()
        self._models_read_s = 0.0
        self._without_kv_s = -inf

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            started_s = clock()
            await self.check()
            await asyncio.sleep(max(self._interval_s - (clock() - started_s), self._interval_s * _LEAST_PAUSE_SHARE))

    async def check(self) -> None:
        """Check once and tell the registry."""
        began_s, late_before_s = self._registry.checks.now_s, self._lag_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                probe = await self._probe()
        except (TimeoutError, httpx2.TimeoutException):
            reason = f"health check took longer than {self._timeout_s:g} s"
            late_s = self._lag_s() - late_before_s
            if late_s > self._timeout_s * _MOST_OWN_SHARE:
                self._registry.checks.excuse(self._instance, f"{reason}, {late_s:.1f} s of which are this process' own")
            else:
                self._registry.checks.failed(self._instance, reason, since_s=began_s)
        except httpx2.ConnectError as error:  # nothing listens there: no need to see that three times
            if is_own_fault(
                error
            ):  # a problem of this process, which is reported as one: it tells nothing of the instance
                return
            reason = f"can't be reached: {connect_failure_reason(error)}"
            self._reports = False  # whatever answers there next is another process
            self._registry.checks.failed(self._instance, reason, may_drain=True)
            self._registry.checks.connection_failed(self._instance, reason)
        except (*FETCH_ERRORS, _CheckFailedError) as error:
            self._registry.checks.failed(self._instance, f"health check failed: {error or type(error).__name__}")
        else:
            self._registry.checks.succeeded(self._instance, probe)

    async def _probe(self) -> ProbeResult:
        in_flight = self._load.of(self._instance).in_flight
        status, _ = await self._get("/health")
        if status not in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}:
            raise _CheckFailedError(f"/health answered {status}")
        before = self._registry.get(self._instance)
        now_s = asyncio.get_running_loop().time()
        settled = before.state is InstanceState.HEALTHY
        if not settled or status == HTTPStatus.NOT_FOUND or now_s - self._models_read_s > _SELDOM_S:
            self._models = await self._list_models()
            self._models_read_s = now_s
        without_kv = settled and now_s - self._without_kv_s < _SELDOM_S
        stats, problem = (None, _NO_KV) if without_kv else await self._stats()
        return ProbeResult(
            models=self._models,
            stats=stats,
            stats_problem=problem,
            in_flight=max(in_flight, self._load.of(self._instance).in_flight),
            kv=self._kv,
        )

    async def _list_models(self) -> tuple[Model, ...]:
        status, body = await self._get("/v1/models")
        if status == HTTPStatus.LOOP_DETECTED:
            raise _CheckFailedError("it is this gateway itself, or leads back to it")
        if status != HTTPStatus.OK:
            raise _CheckFailedError(f"/v1/models answered {status}")
        try:
            raw = msgspec.json.decode(body, type=_ModelList).data
            return tuple(
                Model(
                    id=msgspec.json.decode(each, type=_ModelCard).id,
                    card=msgspec.json.decode(each, type=dict[str, Any]),
                )
                for each in raw
            )
        except UNREADABLE as error:
            raise _CheckFailedError(f"/v1/models is not a model list: {error}") from error

    async def _stats(self) -> tuple[InstanceStats | None, str | None]:
        status, body = await self._get(STATS_PATH)
        self._kv = status in {HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE}  # the latter is ours, too busy to say
        if status == HTTPStatus.NOT_FOUND:
            self._reports = False
            self._without_kv_s = asyncio.get_running_loop().time()
            return None, _NO_KV
        if status != HTTPStatus.OK:
            return self._unreported(f"{STATS_PATH} answered {status}")
        try:
            now = self._registry.get(self._instance)
            stats = read_report(body, url=now.url, rules=None if now.source is Source.SETTINGS else self._rules)
        except ReportError as error:
            raise _CheckFailedError(f"{STATS_PATH} reports impossible values: {error}") from error
        except UNREADABLE as error:
            return self._unreported(f"{STATS_PATH} can't be read ({error})")
        self._reports = True
        return stats, _tiers_problem(stats)

    def _unreported(self, problem: str) -> tuple[None, str]:
        """An engine that never reported may be of another kind; one that did is stuck."""
        if self._reports:
            raise _CheckFailedError(problem)
        return None, f"healthy; {problem}, so its residency is learned from routed requests"

    async def _get(self, path: str) -> tuple[int, bytes]:
        url = self._registry.get(self._instance).url + path
        return await fetch(self._client, "GET", url, limit_bytes=_MAX_ANSWER_BYTES)
