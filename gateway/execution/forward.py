"""Has an instance answer an admitted request: plan, send, relay; another instance where the first one fails in time."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import NamedTuple

from gateway.admission import AdmissionController, AdmissionSlot
from gateway.errors import ApiError, NoInstanceError, UpstreamFailedError, UpstreamTimeoutError
from gateway.execution.legs import EngineCall, LegExecutor, LegFailedError
from gateway.execution.reports import InstanceReports
from gateway.execution.running_plans import PlanRun, RunningPlans
from gateway.fingerprint import Fingerprint, Gap
from gateway.http.deadline import Deadline
from gateway.http.exchange import Exchange
from gateway.http.headers import Header, towards_engine
from gateway.http.status import BAD_REQUEST
from gateway.http.via import Via
from gateway.placement.planner import Plan, Planner
from gateway.placement.separation import RequestSize
from gateway.registry import Instance, LoadTracker, Permit, Registry
from gateway.requests.call import Call
from gateway.requests.paths import PATH_BYTES
from gateway.telemetry import Outcome, RequestRecord, Telemetry
from gateway.telemetry.trace_context import with_context
from gateway.types import Tenant
from gateway.upstream import (
    Attempts,
    FailureKind,
    Opening,
    Relayed,
    RetryBudget,
    UpstreamClient,
    UpstreamFailureError,
    relay,
)
from gateway.upstream.relay import OURS, AnswerShape
from gateway.upstream.urgency import urgency_headers
from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.priority import Priority

_SALT_HEADER = CACHE_SALT_HEADER.lower().encode()


class Admitted(NamedTuple):
    """A request that has its admission slot. ``shape`` is what the relay reads answers by, ``due_s`` the end of its
    class's wait, ``opening`` the early head of a stream.
    """

    tenant: Tenant
    fingerprint: Fingerprint | Gap
    slot: AdmissionSlot
    deadline: Deadline
    size: RequestSize
    shape: AnswerShape
    due_s: float
    opening: Opening | None


class _Try(NamedTuple):
    """One attempt at one instance."""

    plan: Plan
    run: PlanRun
    permit: Permit
    call: EngineCall
    attempts: Attempts
    tried: set[InstanceId]
    own_headers: Sequence[Header]


class Forwarder:
    """One object for all requests, holding none of their state.

    A request is tried on another instance only while its client has not been sent a byte, only for the causes in
    ``upstream.retry``, within ``max_attempts`` and a budget.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        max_attempts: int,
        admission: AdmissionController,
        planner: Planner,
        load: LoadTracker,
        registry: Registry,
        client: UpstreamClient,
        legs: LegExecutor,
        plans: RunningPlans,
        retries: RetryBudget,
        telemetry: Telemetry,
        via: Via,
    ) -> None:
        self._max_attempts = max_attempts
        self._admission = admission
        self._planner = planner
        self._load = load
        self._breakers = registry.breakers
        self._hung = registry.checks.hung
        self._reports = InstanceReports(registry=registry, admission=admission)
        self._client = client
        self._legs = legs
        self._plans = plans
        self._retries = retries
        self._telemetry = telemetry
        self._via = via

    async def forward(self, exchange: Exchange, call: Call, admitted: Admitted, record: RequestRecord) -> None:
        """Plan and try until an instance answers; raises ``ApiError`` when none does."""
        path = exchange.target(PATH_BYTES[call.operation])
        attempts = Attempts(self._retries, most=self._max_attempts)
        headers = [*_engine_headers(exchange, record), self._via.entry(exchange.http_version)]
        # An instance may leave between admission and its use: then admission raises that there is none.
        instances = admitted.slot.instances or self._admission.ready(call.model)
        tried: set[InstanceId] = set()
        while True:
            plan = self._planner.plan(
                admitted.fingerprint,
                instances,
                session=exchange.header(b"x-session-id"),
                size=admitted.size,
                without=tried,
            )
            record.planned(plan)
            attempts.begin(others=lambda: len(self._admission.untried(call.model, tried)))
            engine_call = EngineCall(
                operation=call.operation,
                path=path,
                request_id=record.request_id,
                headers=[*with_context(headers, record), *_private(plan, admitted)],
                body=call.body,
                opening=admitted.opening,
            )
            ended = await self._carry_out(plan, engine_call, attempts, tried, exchange, call, admitted, record)
            if isinstance(ended, Relayed):
                record.relayed(ended)
                if ended.failure not in OURS:  # then it pays like one whose client leaves
                    admitted.slot.settle(ended.settled_status, ended.usage)
                return
            self._telemetry.retried(ended)
            record.tried_in_vain(ended)
            instances = self._admission.untried(call.model, tried)

    async def _carry_out(  # noqa: PLR0913, PLR0917 - one place calls it
        self,
        plan: Plan,
        engine_call: EngineCall,
        attempts: Attempts,
        tried: set[InstanceId],
        exchange: Exchange,
        call: Call,
        admitted: Admitted,
        record: RequestRecord,
    ) -> Relayed | str:
        """Count a plan at its instances while it is attempted."""
        own = _own_headers(plan, record)
        if admitted.opening is not None:
            admitted.opening.attempted(own)
        for each in (plan.instance.id, *plan.others):
            self._breakers.picked(each)
        with self._load.placed(
            plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold, places=call.answers
        ) as permit:
            admitted.slot.placed(plan.instance.id)
            try:
                with self._plans.begin(plan.execution, admitted.deadline.end) as run:
                    this = _Try(plan, run, permit, engine_call, attempts, tried, own)
                    ended = await self._attempt(exchange, admitted, this, record)
                    if not isinstance(ended, Relayed) or ended.failure is not None:
                        run.failed(str(ended if isinstance(ended, str) else ended.failure))
            finally:
                for each in (plan.instance.id, *plan.others):
                    self._breakers.ended(each)
        return ended

    async def _attempt(
        self, exchange: Exchange, admitted: Admitted, this: _Try, record: RequestRecord
    ) -> Relayed | str:
        """Carry out one plan: relay its answer, or return why another plan is to be tried."""
        instance = this.plan.instance
        try:
            answering = await self._legs.before_answer(this.plan, this.call)
            this.run.prepared()
            sent_s = record.answering()
            response = await self._client.open(
                instance.url,
                answering.path,
                headers=answering.headers,
                body=answering.body,
                hung=partial(self._hung, instance.id),
                silence=admitted.opening,
            )
        except UpstreamFailureError as failure:
            if isinstance(failure, LegFailedError):
                instance = failure.instance
            this.tried.add(instance.id)
            self._reports.failed(instance, failure, since_s=record.sent_s)
            if this.attempts.again(failure.kind):
                return failure.kind
            record.outcome = Outcome.UPSTREAM_ERROR
            raise _refusal(failure, instance) from None
        with closing(response):
            self._reports.began(instance, response.status, after_s=monotonic() - sent_s)
            this.tried.add(instance.id)
            if this.attempts.again(response.status):
                return f"status_{response.status}"
            self._began(admitted, this, record, status=response.status, is_stream=response.is_event_stream)
            try:
                relayed = await relay(
                    response,
                    exchange,
                    shape=admitted.shape,
                    own_headers=this.own_headers,
                    deadline=admitted.deadline,
                    paused=self._telemetry.paused,
                    opening=admitted.opening,
                )
            except UpstreamFailureError as failure:  # its client gets a 5xx, which costs nothing
                admitted.slot.settle(HTTPStatus.BAD_GATEWAY, None)
                self._reports.failed(instance, failure, since_s=record.sent_s)
                record.outcome = Outcome.UPSTREAM_ERROR
                raise _refusal(failure, instance) from None
        self._reports.ended(instance, response.status, relayed)
        if relayed.failure is None and response.status < BAD_REQUEST:
            took_s = monotonic() - record.sent_s
            record.overestimated_tokens = self._planner.ended(this.plan, relayed.usage, took_s=took_s)
        return relayed

    def _began(self, admitted: Admitted, this: _Try, record: RequestRecord, *, status: int, is_stream: bool) -> None:
        """Note that the answer which the client gets has begun."""
        this.permit.first_byte()
        this.run.began()
        admitted.slot.began()
        record.first_byte_s = monotonic()
        record.status = status
        if status < BAD_REQUEST:
            self._planner.computed(this.plan)
            if is_stream:
                self._planner.began(this.plan, took_s=record.first_byte_s - record.sent_s)


def _engine_headers(exchange: Exchange, record: RequestRecord) -> list[Header]:
    headers = towards_engine(exchange.headers)
    headers.append((b"x-request-id", record.request_id.encode()))
    if exchange.header(b"content-type") is None:
        headers.append((b"content-type", b"application/json"))
    return headers


def _private(plan: Plan, admitted: Admitted) -> tuple[Header, ...]:
    """Return the headers that only an instance with ``/kv/v1`` is sent: the salt is a tenant's secret."""
    if not plan.instance.kv:
        return ()
    served_as: Priority = admitted.slot.served_as
    return (
        (_SALT_HEADER, admitted.tenant.salt.encode()),
        *urgency_headers(served_as, due_in_s=admitted.due_s - monotonic()),
    )


def _own_headers(plan: Plan, record: RequestRecord) -> list[Header]:
    return [
        (b"x-request-id", record.request_id.encode()),
        (b"x-kvgate-instance", plan.instance.id.encode()),
        (b"x-kvgate-route", record.route.encode()),
        (b"x-kvgate-matched-tokens", str(plan.matched_tokens).encode()),
        *record.limits,
    ]


def _refusal(failure: UpstreamFailureError, instance: Instance) -> ApiError:
    match failure.kind:
        case FailureKind.FIRST_BYTE_TIMEOUT | FailureKind.IDLE_TIMEOUT:
            return UpstreamTimeoutError(str(failure))
        case FailureKind.NO_FILES:
            return NoInstanceError(str(failure), code="no_file_descriptor", retry_after_s=2)
        case FailureKind.CONNECT | FailureKind.CONNECT_TIMEOUT:
            return NoInstanceError(f"instance {instance.id}: {failure}", retry_after_s=2)
        case _:
            return UpstreamFailedError(str(failure))
