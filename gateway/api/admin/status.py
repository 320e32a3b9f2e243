"""``/admin/v1/status``: all that the status page and ``kvgate top`` show, in one cheap answer.

Nothing is asked of an instance: what health checks brought is shown. Only shared quotas ask Redis.
"""

import asyncio
from time import time
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.admission import AdmissionController, Authenticator, QuotaMeter, QuotaUnavailableError
from gateway.api.admin.instances import InstanceView, InstanceViews
from gateway.api.admin.routes import admin_routes
from gateway.api.admin.views import UsageView
from gateway.dashboard import FleetBoard
from gateway.limits import SloClass
from gateway.problems import ProblemKind, Problems
from gateway.registry import Instance
from gateway.telemetry import Interval, Telemetry
from gateway.telemetry.siblings import Siblings
from gateway.telemetry.traffic import INTERVAL_S
from gateway.types import Tenant, TenantId
from kvcontrol.core.priority import Priority


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class TierView(_View):
    """One tier of an instance, in blocks."""

    capacity_blocks: int
    used_blocks: int = Field(description="Held by requests or kept by the cache.")
    cached_blocks: int = Field(description="Those of them that a later request could reuse.")
    block_bytes: int


class InstanceStatus(InstanceView):
    """One instance, with its last health check; null: not reported by the engine."""

    resident_blocks: dict[str, int]
    running: int | None
    waiting: int | None
    request_limit: int = Field(description="Requests that it is given at once at most, now.")
    engine: str | None
    device: str | None
    tiers: dict[str, TierView]
    query_tokens: int | None = Field(description="Prompt tokens looked up in its prefix cache since its start.")
    hit_tokens: int | None = Field(description="Those of them that it found.")


class TenantStatus(_View):
    """A tenant, its limits (null is none) and what counts against them; usage is null where nothing is counted."""

    tenant: str
    suspended: bool
    requests_per_min: int | None
    tokens_per_min: int | None
    concurrency: int | None
    context_tokens: int | None
    priority: Priority
    slo: SloClass
    usage: UsageView | None
    problem: str | None = Field(description="Why the usage is unknown.")


class IntervalView(_View):
    """What ended within an interval."""

    number: int
    at_s: float = Field(description="Its end, seconds since 1970.")
    span_s: float
    outcomes: dict[str, int]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    prompt_tokens: int
    completion_tokens: int
    known_tokens: int = Field(description="Prompt tokens whose answers report cached tokens.")
    cached_tokens: int
    expected_tokens: int = Field(description="Those that routing expected to be cached.")
    in_flight: int
    waiting: int


class ProblemView(_View):
    """Something that is wrong with this gateway now."""

    kind: ProblemKind
    subject: str
    message: str


class WorkerView(_View):
    """Which of several workers answered: traffic and requests in flight are this one's."""

    own: int
    count: int


class StatusView(_View):
    """The gateway now, and its traffic lately."""

    policy: str = Field(description="How instances are chosen.")
    usable: int
    outcomes: dict[str, int] = Field(description="How requests ended since this process started.")
    at_s: float = Field(description="Seconds since 1970.")
    open: bool = Field(description="Whether any API key is accepted.")
    worker: WorkerView | None
    waiting: int
    problems: list[ProblemView] = Field(description="Problems of the process that answers.")
    interval_s: float
    process: str = Field(description="Whose numbers the intervals have: another one after a restart.")
    instances: list[InstanceStatus]
    tenants: list[TenantStatus] = Field(description="Those known by name, 100 at most.")
    intervals: list[IntervalView]


class StatusBoard:
    """Reads the live objects."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        fleet: FleetBoard,
        views: InstanceViews,
        admission: AdmissionController,
        authenticator: Authenticator,
        meter: QuotaMeter,
        telemetry: Telemetry,
        siblings: Siblings | None,
        problems: Problems,
    ) -> None:
        self._fleet = fleet
        self._views = views
        self._admission = admission
        self._authenticator = authenticator
        self._meter = meter
        self._telemetry = telemetry
        self._siblings = siblings
        self._problems = problems

    async def view(self, after: int, process: str | None) -> StatusView:
        """Return the gateway as it is now, with the intervals after that number of that process."""
        public = self._fleet.view()
        accounts = tuple(self._authenticator.accounts.values())
        return StatusView(
            policy=public.policy,
            usable=public.usable,
            outcomes=public.outcomes,
            at_s=time(),
            open=self._authenticator.open,
            worker=None if self._siblings is None else WorkerView(own=self._siblings.own, count=self._siblings.count),
            waiting=self._admission.waiting,
            problems=[
                ProblemView(kind=each.kind, subject=each.subject, message=each.message) for each in self._problems.all()
            ],
            interval_s=INTERVAL_S,
            process=self._telemetry.traffic.process,
            instances=[self._instance(each) for each in self._views.registry.all()],
            tenants=list(await asyncio.gather(*(self._tenant(each) for each in accounts))),
            intervals=[_interval(each) for each in self._telemetry.traffic.since(after, process)],
        )

    def _instance(self, each: Instance) -> InstanceStatus:
        summary, stats = self._fleet.summary(each), each.stats
        return InstanceStatus(
            **dict(self._views.view(each)),
            resident_blocks=summary.resident_blocks,
            running=summary.running,
            waiting=summary.waiting,
            request_limit=self._admission.capacity.limit(each),
            engine=None if stats is None else f"{stats.engine} {stats.engine_version}".strip(),
            device=None if stats is None else stats.device,
            tiers={}
            if stats is None
            else {
                str(tier): TierView(
                    capacity_blocks=held.capacity_blocks,
                    used_blocks=held.used_blocks,
                    cached_blocks=held.cached_blocks,
                    block_bytes=held.block_bytes,
                )
                for tier, held in stats.tiers.items()
            },
            query_tokens=None if stats is None else stats.prefix_cache.query_tokens,
            hit_tokens=None if stats is None else stats.prefix_cache.hit_tokens,
        )

    async def _tenant(self, tenant: Tenant) -> TenantStatus:
        limits = tenant.limits
        usage, problem = None, None
        if limits.metered:
            try:
                used = await self._meter.usage(tenant.id)
            except QuotaUnavailableError as error:
                problem = str(error)
            else:
                usage = UsageView(tenant=tenant.id, requests=used.requests, tokens=used.tokens, running=used.running)
        return TenantStatus(
            tenant=tenant.id,
            suspended=self._authenticator.suspended(TenantId(tenant.id)),
            requests_per_min=limits.requests_per_min,
            tokens_per_min=limits.tokens_per_min,
            concurrency=limits.concurrency,
            context_tokens=limits.context_tokens,
            priority=limits.priority,
            slo=limits.slo,
            usage=usage,
            problem=problem,
        )


def status_router(board: StatusBoard) -> APIRouter:
    """Return the route."""
    router = admin_routes("status")

    @router.get("/status")
    async def status(
        response: Response,
        after: Annotated[int, Query(ge=0, le=1 << 53, description="Number of the last known interval; 0: none.")] = 0,
        process: Annotated[
            str | None,
            Query(max_length=64, description="Process of that number; all intervals if it is another one."),
        ] = None,
    ) -> StatusView:
        """The gateway now: instances with their tiers, tenants with their use, the traffic of the last ten minutes."""
        response.headers["cache-control"] = "no-store"
        return await board.view(after, process)

    return router


def _interval(each: Interval) -> IntervalView:
    return IntervalView(
        number=each.number,
        at_s=each.at_s,
        span_s=each.span_s,
        outcomes={outcome.value: count for outcome, count in each.outcomes.items()},
        ttft_p50_s=each.ttft_p50_s,
        ttft_p99_s=each.ttft_p99_s,
        prompt_tokens=each.prompt_tokens,
        completion_tokens=each.completion_tokens,
        known_tokens=each.known_tokens,
        cached_tokens=each.cached_tokens,
        expected_tokens=each.expected_tokens,
        in_flight=each.in_flight,
        waiting=each.waiting,
    )
