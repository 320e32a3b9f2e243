"""Constructs the gateway and runs its loops."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial

import zmq.asyncio
from fastapi import FastAPI

from gateway.admission import Authenticator
from gateway.api.admin import AdminAccess, add_failure_handlers
from gateway.api.asgi import Gateway
from gateway.api.browsers import Browsers
from gateway.api.failures import add_last_handlers
from gateway.http.client import make_client
from gateway.http.connection_pool import ConnectionPool
from gateway.http.pooled_transport import PooledTransport
from gateway.registry.leases import Leases
from gateway.registry.membership import Loops
from gateway.settings import Settings
from gateway.supervisor import running
from gateway.telemetry.resources import Resources
from gateway.telemetry.siblings import Siblings
from gateway.wiring.admin import operator_routers
from gateway.wiring.base import Base, open_base
from gateway.wiring.control import build_config_sync, build_control
from gateway.wiring.instances import (
    Instances,
    Links,
    build_instances,
    build_leases,
    build_membership,
    discovery_loops,
)
from gateway.wiring.observation import Observation, build_observation
from gateway.wiring.requests import Serving, build_serving, open_threads

_log = logging.getLogger(__name__)


def build_app(settings: Settings, siblings: Siblings | None = None) -> Gateway:
    """Return the gateway for these settings; its loops run while its lifespan does.

    Reads the tokenizer and the salt secret, which takes seconds; raises ``StartupError`` when one can't be had.
    """
    base = open_base(settings, siblings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _running(app, base):
            yield

    app = Gateway(
        base.shutdown, title="kvgate", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.browsers = Browsers(settings.access.cors_origins, hosts=base.hosts, keyless=lambda: base.authenticator.open)
    add_failure_handlers(app)
    add_last_handlers(app)
    app.state.admin_access = AdminAccess(base.admin_key)
    key = settings.access.registration_key
    app.state.registration_access = None if key is None else AdminAccess(key.get_secret_value())
    return app


@asynccontextmanager
async def _running(app: Gateway, base: Base) -> AsyncIterator[None]:
    """Construct what needs the event loop, add its routes to ``app``, and run all loops."""
    settings = base.settings
    instances, observation = build_instances(settings), build_observation()
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(open_threads(base, observation))
        context = stack.enter_context(zmq.asyncio.Context())
        # Two: a request on a connection that a health check has used would be sent again where the engine drops it.
        pool, control_pool = (stack.enter_context(closing(ConnectionPool(instances.resolver))) for _ in range(2))
        client = await stack.enter_async_context(
            make_client(PooledTransport(control_pool), connect_s=instances.timeouts.connect_s, headers=base.via.text())
        )
        links = Links(client=client, context=context)
        serving = build_serving(base, instances, observation, threads, pool)
        config_sync = build_config_sync(base, instances, serving, observation)
        membership = build_membership(settings, instances, links, observation, (serving.planner, config_sync))
        leases = build_leases(settings, instances, membership, base.shared.board)
        control = build_control(base, instances, links, observation, config_sync)
        for router in operator_routers(base, instances, serving, control, observation, membership, leases):
            app.router.routes.extend(router.routes)
        app.state.admin_changes = control.changes
        app.inference = serving.api
        loops: Loops = {
            **_own_loops(base, instances, serving, observation, leases),
            **control.loops(settings.state.store_poll_s),
            **discovery_loops(settings, instances, membership, observation),
        }
        try:
            instances.registry.checks.tenants(several=base.authenticator.several)
            await control.directory.refresh()
            _log_mode(settings, base.authenticator, stored=len(control.directory.current.instances))
            async with membership:
                config_sync.follow(membership, control.directory.current)
                async with running(loops, on_failure=observation.telemetry.loop_failed):
                    yield
        finally:
            await base.shared.close()
            if base.traces is not None:
                await asyncio.to_thread(base.traces.close)


def _own_loops(base: Base, instances: Instances, serving: Serving, observation: Observation, leases: Leases) -> Loops:
    state, telemetry = base.settings.state, observation.telemetry
    folder = None if state.store_url is not None else state.state_dir
    redis = base.shared.redis
    return {
        **({} if redis is None else {"redis": partial(redis.run, observation.problems)}),
        "admission": serving.admission.run,
        "quotas": base.shared.quotas.run,
        "leases": leases.run,
        "lag": observation.lag.run,
        "resources": Resources(observation.problems, folder=folder).run,
        "traffic": partial(telemetry.traffic.run, lambda: instances.load.total, lambda: serving.admission.waiting),
    }


def _log_mode(settings: Settings, authenticator: Authenticator, *, stored: int) -> None:
    if authenticator.open:
        _log.warning("no API keys are configured: any API key is accepted, and each is a tenant of its own")
    if settings.requests.tokenizer is None:
        _log.warning(
            "no tokenizer is configured: texts are routed by load or by where similar texts went, not by announced "
            "blocks; set KVGATE_TOKENIZER to a model folder"
        )
    fleet = settings.fleet
    count = len(fleet.instances) + stored
    if not count and not fleet.discovers:
        _log.warning(
            "no instances are configured: requests get 503 until one is added, with kvgate admin instances add ID URL, "
            "kvgate register beside the engine, the setting KVGATE_INSTANCES or a discovery setting"
        )
    _log.info("%d instances, routing policy %s", count, settings.routing.routing_policy)
