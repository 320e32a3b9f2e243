"""``/kv/v1`` and our series on ``/metrics`` of the api_server, answered by the agent in the engine process.

The way between them is a ZMQ request over a Unix socket with a deadline: an engine that is gone or stuck becomes a 503
that says so, never a request that hangs. Bodies are the agent's bytes, passed on untouched.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.control.errors import EngineUnavailableError, RefusedError, StaleFenceError
from engines.control.families import family, histogram, single
from engines.control.policy_metrics import policy_series
from engines.control.routes import mount_control
from engines.control.tier_metrics import offload_series, tenant_series, tier_series
from engines.events.publisher import OK, REFUSED, STALE
from engines.lmdeploy.agent import COUNTERS, EventCounters, LaunchInfo, launch_of, note_launch
from engines.lmdeploy.http import admission
from engines.lmdeploy.http.availability import EngineGoneMiddleware
from engines.lmdeploy.http.concurrency_limit import ConcurrencyLimitMiddleware
from engines.lmdeploy.http.control_socket import private_endpoint
from engines.lmdeploy.http.server_sleep import OperationOrderMiddleware
from engines.lmdeploy.lifeline import engine_gone
from engines.lmdeploy.loop_lag import LoopLag
from engines.lmdeploy.pd.metrics import pd_series
from engines.lmdeploy.pd.request import PART
from engines.lmdeploy.schedule.step_metrics import step_series
from engines.lmdeploy.schedule.step_operations import mount_step_routes
from engines.lmdeploy.settings import EngineSettings, collector_of
from engines.requests.headers import HeaderMiddleware
from engines.requests.salt import SALT
from engines.requests.urgency import URGENCY
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.series.engine import process as catalogue
from kvcontrol.tracing import start_tracing

if TYPE_CHECKING:
    from kvcontrol.tracing.outlet import SpanCounts, Tracing

SCRAPE_TIMEOUT_S = 0.25
"""A scrape runs on the api_server's event loop: better a gap in the series than a stalled stream."""


class ControlClient:
    """Asks the agent at ``endpoint``. Any number of threads; a socket lives for one request."""

    def __init__(self, endpoint: str, *, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._ids = itertools.count()

    async def ask(self, operation: bytes, body: bytes = b"") -> bytes:
        """Like ``ask_now``, beside the event loop."""
        return await asyncio.to_thread(self.ask_now, operation, body, timeout_s=self._timeout_s)

    def ask_now(self, operation: bytes, body: bytes = b"", *, timeout_s: float) -> bytes:
        """Return the answer's body.

        Raises ``EngineUnavailableError`` after ``timeout_s`` or on an error answer, ``RefusedError`` when the engine
        process refuses.
        """
        request_id = next(self._ids).to_bytes(8, "big")
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            socket.send_multipart((b"", request_id, operation, body))
            if not socket.poll(round(timeout_s * 1000)):
                raise EngineUnavailableError(
                    f"the engine process did not answer {operation.decode()!r} within {timeout_s:g} s:"
                    " the engine process has ended or hangs"
                )
            _, _, status, answer = socket.recv_multipart()
        finally:
            socket.close(linger=0)
        if status == STALE:
            raise StaleFenceError(answer.decode())
        if status == REFUSED:
            raise RefusedError(answer.decode())
        if status != OK:
            raise EngineUnavailableError(f"the engine process failed to do {operation.decode()!r}: {answer.decode()}")
        return bytes(answer)

    def close(self) -> None:
        self._context.destroy(linger=0)


class EngineCollector(Collector):
    """Our series, asked for at each scrape; while the engine doesn't answer, ``kvgate_engine_up`` is 0 and alone."""

    def __init__(self, client: ControlClient, lag: LoopLag, spans: "SpanCounts | None" = None) -> None:
        """``lag`` is that of the api_server's loop, ``spans`` what became of its spans, None where there are none."""
        self._client = client
        self._lag = lag
        self._spans = spans

    def describe(self) -> Iterator[Metric]:
        """Nothing to declare in advance: registering must not ask the engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            body = self._client.ask_now(COUNTERS, timeout_s=SCRAPE_TIMEOUT_S)
            counters = msgspec.json.decode(body, type=EventCounters)
        except (EngineUnavailableError, *UNREADABLE):
            yield single(catalogue.UP, 0)
            return
        yield single(catalogue.UP, 1)
        resident = counters.resident_blocks
        yield family(catalogue.RESIDENT_BLOCKS, (((tier.value,), blocks) for tier, blocks in resident.items()))
        kinds = (("stored", counters.stored), ("removed", counters.removed), ("cleared", counters.cleared))
        yield family(catalogue.KV_EVENTS, (((kind,), total) for kind, total in kinds))
        for series, value in (
            (catalogue.KV_EVENTS_SEQ, counters.seq),
            (catalogue.KV_EVENTS_DROPPED, counters.dropped),
            (catalogue.KV_EVENTS_RESYNCS, counters.resyncs),
            (catalogue.HOOK_ERRORS, counters.hook_errors),
            (catalogue.EVICTION_ERRORS, counters.eviction_errors),
            (catalogue.PUBLISHER_ERRORS, counters.publisher_errors),
        ):
            yield single(series, value)
        lags = [("api_server", self._lag.report()), ("engine", counters.loop_lag)]
        yield histogram(
            catalogue.LOOP_LAG,
            (((process,), lag.buckets, lag.total_s) for process, lag in lags if lag is not None),
        )
        if (spans := self._spans) is not None:
            outcomes = (("exported", spans.exported), ("failed", spans.failed), ("dropped", spans.dropped))
            yield family(catalogue.TRACE_SPANS, (((outcome,), count) for outcome, count in outcomes))
        pinned = counters.pinned_blocks
        yield family(catalogue.PINNED_BLOCKS, (((tier.value,), blocks) for tier, blocks in pinned.items()))
        yield from tier_series(counters.tiers, counters.counts)
        if counters.offload is not None:
            yield from tenant_series(counters.counts)
            yield from offload_series(counters.offload)
        if counters.pd is not None:
            yield from pd_series(counters.pd)
        if counters.steps is not None:
            yield from step_series(counters.steps)
        if counters.policies is not None:
            yield from policy_series(counters.policies, counters.refused_swaps)


def mount(app: FastAPI, client: ControlClient, *, metrics: bool, tracing: "Tracing | None" = None) -> None:
    """Add ``/kv/v1``, the salt's middleware and, with ``metrics``, our series to LMDeploy's app, for its lifespan;
    ``tracing`` ends with it.
    """
    mount_control(app, client.ask)
    mount_step_routes(app, client.ask)
    for header in (SALT, URGENCY, PART):
        app.add_middleware(HeaderMiddleware, header=header)
    lag = LoopLag()
    collector = EngineCollector(client, lag, None if tracing is None else tracing.counts)
    if metrics:
        REGISTRY.register(collector)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        lag.start(asyncio.get_running_loop())
        try:
            async with inner(app) as state:
                yield state
        finally:
            lag.stop()
            if metrics:
                REGISTRY.unregister(collector)
            client.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app.router.lifespan_context = lifespan


def exposed_as_text(exposition: ASGIApp) -> ASGIApp:
    """Return ``/metrics`` that answers Prometheus text whatever is accepted.

    ``prometheus_client`` writes the colons of LMDeploy's names as underscores in OpenMetrics, which Prometheus asks for
    first: every query for LMDeploy's series would find nothing.
    """

    async def as_text(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [each for each in scope.get("headers", ()) if each[0] != b"accept"]
        await exposition({**scope, "headers": headers}, receive, send)

    return as_text


def _tracing(settings: EngineSettings) -> "Tracing | None":
    collector = collector_of(settings)
    return None if collector is None else start_tracing(collector, service="kvgate-engine")


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def async_engine_init(original: Callable[..., None]) -> Callable[..., None]:
    """``AsyncEngine.__init__``, in the api_server before the engine exists: settle where the two will meet."""

    def __init__(  # noqa: N807  # called by this name
        self: Any,
        model_path: str,
        model_name: str | None = None,
        backend: str = "turbomind",
        backend_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if backend == "pytorch" and backend_config is not None and launch_of(backend_config) is None:
            endpoint = EngineSettings.load().control_endpoint or private_endpoint(os.getpid())
            note_launch(backend_config, LaunchInfo(model=model_name or model_path, control_endpoint=endpoint))
        original(self, model_path, model_name, backend, backend_config, *args, **kwargs)

    return __init__


def mount_metrics(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``api_server.mount_metrics``: the one place that sees the app and its configuration before it serves."""

    def mount_metrics(app: FastAPI, backend_config: Any) -> None:
        before = len(app.routes)
        original(app, backend_config)
        for route in app.routes[before:]:
            if isinstance(route, Mount):
                route.app = exposed_as_text(route.app)
        launch = launch_of(backend_config)
        if launch is not None and launch.control_endpoint is not None:
            settings = EngineSettings.load()
            client = ControlClient(launch.control_endpoint, timeout_s=settings.control_timeout_s)
            tracing = _tracing(settings)
            mount(app, client, metrics=bool(backend_config.enable_metrics), tracing=tracing)
            admission.mount(app, backend_config)
            app.add_middleware(OperationOrderMiddleware)
            app.add_middleware(ConcurrencyLimitMiddleware, bound=settings.max_requests)
            app.add_middleware(EngineGoneMiddleware, gone=engine_gone)
            if tracing is not None:
                from engines.lmdeploy.http.spans import SpanMiddleware

                app.add_middleware(SpanMiddleware, tracing=tracing)

    return mount_metrics
