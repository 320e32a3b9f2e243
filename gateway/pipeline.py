"""THE request path, on one page: authenticate -> fingerprint -> admit -> match -> plan -> forward -> settle.

Each step is a component's; this file holds their order and who takes over when one says no. A request is tried on
another instance only while its client has not been sent a byte, only for the causes in ``upstream.retry``, and within a
budget.
"""

import random
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission import AdmissionController, AdmissionSlot, Authenticator, keys_of
from gateway.errors import (
    ApiError,
    DeadlineError,
    NoInstanceError,
    PlanCancelledError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from gateway.execution.legs import EngineCall, LegFailedError, Walker
from gateway.execution.running_plans import PlanRun, RunningPlans
from gateway.fingerprint import Fingerprint, Gap, Unreadable
from gateway.http.body_memory import BodyRoom
from gateway.http.deadline import HEADER as TIMEOUT_HEADER
from gateway.http.deadline import Deadline, limit_of
from gateway.http.exchange import ClientGoneError, Exchange
from gateway.http.headers import Header, towards_engine
from gateway.http.shutdown import Shutdown
from gateway.http.status import BAD_REQUEST, INTERNAL_SERVER_ERROR
from gateway.http.via import Via
from gateway.limits import Priority, SloClass
from gateway.placement.planner import Plan, Planner
from gateway.placement.separation import RequestSize
from gateway.registry import Instance, LoadTracker, Permit, Registry
from gateway.requests.call import Call
from gateway.requests.estimate import admission_of, admission_of_counting, size_of
from gateway.requests.reader import Reader, Received
from gateway.requests.tokens import TOKEN_OPERATIONS, TokenApi
from gateway.requests.unsupported import refuse_unsupported
from gateway.telemetry import Outcome, RequestRecord, Telemetry
from gateway.telemetry.trace_context import begin_trace, with_context
from gateway.types import Operation, RequestId, Tenant
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
from gateway.upstream.relay import OURS, Asked, scanner_for
from gateway.upstream.urgency import urgency_headers
from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.ids import InstanceId

if TYPE_CHECKING:
    from gateway.telemetry.tracing import RequestTracer

_ENDED = {DeadlineError: Outcome.DEADLINE, PlanCancelledError: Outcome.CANCELLED}
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
PATHS = {
    Operation.CHAT: "/v1/chat/completions",
    Operation.COMPLETIONS: "/v1/completions",
    Operation.EMBEDDINGS: "/v1/embeddings",
    Operation.RESPONSES: "/v1/responses",
    Operation.MESSAGES: "/v1/messages",
    Operation.COUNT_TOKENS: "/v1/messages/count_tokens",
    Operation.GENERATE: "/generate",
    Operation.TOKENIZE: "/tokenize",
    Operation.DETOKENIZE: "/detokenize",
}
"""Where each operation is asked for, here and at an engine."""
_PATHS = {operation: path.encode() for operation, path in PATHS.items()}

_READ = Unreadable(reason="unknown_parts")
_SALT_HEADER = CACHE_SALT_HEADER.lower().encode()
_OVERLOAD = frozenset({FailureKind.CONNECT_TIMEOUT, FailureKind.FIRST_BYTE_TIMEOUT, FailureKind.HUNG})
_TOO_BUSY = frozenset({int(HTTPStatus.TOO_MANY_REQUESTS), int(HTTPStatus.SERVICE_UNAVAILABLE)})
_INSTANCE_FAILED = frozenset(
    {int(HTTPStatus.BAD_GATEWAY), int(HTTPStatus.SERVICE_UNAVAILABLE), int(HTTPStatus.GATEWAY_TIMEOUT)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. ``waits_s`` are those on its wait, here and in the engine, by its class."""

    request_timeout_s: float
    waits_s: Mapping[SloClass, float]
    max_attempts: int
    stream_ping_s: float
    expected_output_tokens: int


class _Findings(NamedTuple):
    """What the steps before forwarding found out."""

    tenant: Tenant
    fingerprint: Fingerprint | Gap
    entry: AdmissionSlot
    deadline: Deadline
    size: RequestSize
    opening: Opening | None


class _Try(NamedTuple):
    """One attempt at one instance."""

    plan: Plan
    run: PlanRun
    permit: Permit
    entry: AdmissionSlot
    call: EngineCall
    attempts: Attempts
    deadline: Deadline
    tried: set[InstanceId]
    opening: Opening | None
    own_headers: Sequence[Header]


class Pipeline:
    """Serves inference requests; one object for all of them, holding none of their state. ``tokens`` answers what needs
    no engine, where the gateway has a tokenizer.
    """

    def __init__(  # noqa: PLR0913 - every step of the path, by name
        self,
        *,
        limits: Limits,
        authenticator: Authenticator,
        reader: Reader,
        admission: AdmissionController,
        planner: Planner,
        load: LoadTracker,
        registry: Registry,
        client: UpstreamClient,
        walker: Walker,
        plans: RunningPlans,
        retries: RetryBudget,
        telemetry: Telemetry,
        via: Via,
        shutdown: Shutdown,
        tokens: TokenApi | None = None,
        tracer: "RequestTracer | None" = None,
    ) -> None:
        self._limits = limits
        self._authenticator = authenticator
        self._reader = reader
        self._admission = admission
        self._planner = planner
        self._load = load
        self._registry = registry
        self._client = client
        self._walker = walker
        self._plans = plans
        self._retries = retries
        self._telemetry = telemetry
        self._via = via
        self._shutdown = shutdown
        self._tokens = tokens
        self._tracer = tracer
        # Requests' names are to be told apart, not to be secret; to ask the system for each is a call of its own.
        self._names = random.Random(secrets.randbits(256))  # noqa: S311

    async def serve(self, operation: Operation, exchange: Exchange) -> None:
        """Answer one request; every way it can end is settled exactly once."""
        record = RequestRecord(
            operation=operation,
            request_id=self._request_id(exchange),
            started_s=monotonic(),
        )
        begin_trace(self._tracer, record, exchange, PATHS[operation])
        room: BodyRoom | None = None
        deadline: Deadline | None = None
        try:
            tenant = self._authenticator.authenticate(keys_of(exchange.headers))
            record.tenant = tenant.id
            if exchange.header(b"via") is not None:
                self._via.check(exchange.headers)
            deadline = Deadline(
                started_s=record.started_s,
                limit_s=limit_of(exchange.header(TIMEOUT_HEADER), longest_s=self._limits.request_timeout_s),
            )
            self._shutdown.enter(deadline)
            room = self._reader.room(tenant)
            with deadline:
                received = await self._reader.receive(exchange, room)
                record.received_s = monotonic()
                exchange.watch(deadline.stop)
                if self._tokens is not None and operation in TOKEN_OPERATIONS:
                    await self._answer_here(self._tokens, exchange, received, tenant, record, deadline)
                    return
                await self._answer(exchange, received, tenant, record, deadline)
        except ClientGoneError:
            record.client_left()
        except ApiError as error:
            record.status = error.status
            record.outcome = _ENDED.get(type(error)) or record.outcome or Outcome.of_status(error.status)
            record.detail = error.reason
            await _refuse(exchange, error, record)
        finally:
            exchange.unwatch()
            if deadline is not None:
                self._shutdown.leave(deadline)
            if room is not None:
                room.give_back()
            self._telemetry.settle(record)

    async def _answer(
        self, exchange: Exchange, received: Received, tenant: Tenant, record: RequestRecord, deadline: Deadline
    ) -> None:
        """Find out what a request asks for, let it in, and have an instance answer it."""
        with await self._reader.hold(tenant, received) as held:
            body = received.body if received.coding is None else await self._reader.decoded(received, tenant)
            call = await self._reader.parse(record.operation, body, tenant)
            record.stream = call.stream
            if self._registry.checks.unchecked:
                await self._registry.checks.until_checked(call.model)
            refuse_unsupported(call, self._admission.candidates(call.model))
            record.model = call.model  # only a name that exists gets into the log
            record.parsed_s = monotonic()
            fingerprint = await self._reader.fingerprint(call, tenant, exchange.header(b"x-session-id"))
            record.fingerprinted(fingerprint)
            ask = admission_of(tenant, call, fingerprint, expected_output_tokens=self._limits.expected_output_tokens)
            call = call._replace(prompt=_READ)  # what was made of a long body is let go
            with await self._admission.admit(ask, held) as entry:
                deadline.check()
                record.admitted_s = monotonic()
                record.limits = entry.headers
                opening = exchange.opening = self._opening(exchange, call) if call.stream else None
                found = _Findings(tenant, fingerprint, entry, deadline, size_of(call, ask, record.request_id), opening)
                await self._forward(exchange, call, found, record)

    async def _answer_here(  # noqa: PLR0913, PLR0917 - one place calls it
        self,
        tokens: TokenApi,
        exchange: Exchange,
        received: Received,
        tenant: Tenant,
        record: RequestRecord,
        deadline: Deadline,
    ) -> None:
        """Answer what needs no instance; a failure that is the request's own costs what an engine's 4xx does."""
        with await self._admission.admit_without_instance(admission_of_counting(tenant)) as entry:
            deadline.check()
            record.limits = entry.headers
            entry.began()
            body = received.body if received.coding is None else await self._reader.decoded(received, tenant)
            record.model, answer = await tokens.answer(record.operation, body, tenant)
            record.status, record.outcome = HTTPStatus.OK, Outcome.OK
            await exchange.reply(HTTPStatus.OK, answer, [(b"x-request-id", record.request_id.encode()), *record.limits])

    def _opening(self, exchange: Exchange, call: Call) -> Opening:
        """Return what tells a streaming client of its instances' silence."""
        return Opening(
            exchange, scanner_for(_asked(call)), dialect=call.operation.dialect, after_s=self._limits.stream_ping_s
        )

    def _request_id(self, exchange: Exchange) -> RequestId:
        given = exchange.header(b"x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            return RequestId(given.decode())
        return RequestId(f"{self._names.getrandbits(128):032x}")

    async def _forward(self, exchange: Exchange, call: Call, found: _Findings, record: RequestRecord) -> None:
        """Plan and try until an instance answers; raises ``ApiError`` when none does."""
        path, opening = exchange.target(_PATHS[call.operation]), found.opening
        attempts = Attempts(self._retries, most=self._limits.max_attempts)
        headers = [*_engine_headers(exchange, record), self._via.entry(exchange.http_version)]
        due_s = record.started_s + self._limits.waits_s[found.tenant.limits.slo]
        # An instance may leave between a turn and its use: then admission says that there is none.
        instances = found.entry.instances or self._admission.ready(call.model)
        tried: set[InstanceId] = set()
        while True:
            plan = self._planner.plan(
                found.fingerprint,
                instances,
                session=exchange.header(b"x-session-id"),
                size=found.size,
                without=tried,
            )
            record.planned(plan)
            own = _own_headers(plan, record)
            if opening is not None:
                opening.asked(own)
            for each in (plan.instance.id, *plan.others):
                self._registry.breakers.picked(each)
            attempts.begin(others=lambda: len(self._admission.untried(call.model, tried)))
            with self._load.placed(
                plan.instance.id, uncached_tokens=plan.uncached_tokens, cold=plan.cold, places=call.answers
            ) as permit:
                found.entry.placed(plan.instance.id)
                engine_call = EngineCall(
                    operation=call.operation,
                    path=path,
                    request_id=record.request_id,
                    headers=[
                        *with_context(headers, record),
                        *_private(plan, found.tenant, found.entry.served_as, due_s),
                    ],
                    body=call.body,
                    opening=opening,
                )
                try:
                    with self._plans.begin(plan.execution, found.deadline.end) as run:
                        this = _Try(
                            plan, run, permit, found.entry, engine_call, attempts, found.deadline, tried, opening, own
                        )
                        ended = await self._attempt(exchange, call, this, record)
                        if not isinstance(ended, Relayed) or ended.failure is not None:
                            run.failed(str(ended if isinstance(ended, str) else ended.failure))
                finally:
                    for each in (plan.instance.id, *plan.others):
                        self._registry.breakers.ended(each)
            if isinstance(ended, Relayed):
                record.relayed(ended)
                if ended.failure not in OURS:  # then it pays like one whose client leaves
                    found.entry.settle(ended.settled_status, ended.usage)
                return
            self._telemetry.retried(ended)
            record.tried_in_vain(ended)
            instances = self._admission.untried(call.model, tried)

    async def _attempt(self, exchange: Exchange, call: Call, this: _Try, record: RequestRecord) -> Relayed | str:
        """Walk one plan: relay its answer, or return why another one is to be tried."""
        instance = this.plan.instance
        try:
            answering = await self._walker.before_answer(this.plan, this.call)
            this.run.prepared()
            sent_s = record.answering()
            response = await self._client.open(
                instance.url,
                answering.path,
                headers=answering.headers,
                body=answering.body,
                hung=partial(self._registry.checks.hung, instance.id),
                silence=this.opening,
            )
        except UpstreamFailureError as failure:
            if isinstance(failure, LegFailedError):
                instance = failure.instance
            this.tried.add(instance.id)
            self._note(instance, failure, since_s=record.sent_s)
            if this.attempts.again(failure.kind):
                return failure.kind
            record.outcome = Outcome.UPSTREAM_ERROR
            raise _refusal(failure, instance) from None
        with closing(response):
            self._begun(instance, response.status, after_s=monotonic() - sent_s)
            this.tried.add(instance.id)
            if this.attempts.again(response.status):
                return f"status_{response.status}"
            this.permit.first_byte()
            this.run.began()
            this.entry.began()
            record.first_byte_s = monotonic()
            record.status = response.status
            if response.status < BAD_REQUEST:
                self._planner.computed(this.plan)
                if response.is_event_stream:
                    self._planner.began(this.plan, took_s=record.first_byte_s - record.sent_s)
            try:
                relayed = await relay(
                    response,
                    exchange,
                    asked=_asked(call),
                    own_headers=this.own_headers,
                    deadline=this.deadline,
                    paused=self._telemetry.paused,
                    opening=this.opening,
                )
            except UpstreamFailureError as failure:  # its client gets a 5xx, which costs nothing
                this.entry.settle(HTTPStatus.BAD_GATEWAY, None)
                self._note(instance, failure, since_s=record.sent_s)
                record.outcome = Outcome.UPSTREAM_ERROR
                raise _refusal(failure, instance) from None
        self._answered(instance, response.status, relayed)
        if relayed.failure is None and response.status < BAD_REQUEST:
            record.overestimated_tokens = self._planner.ended(
                this.plan, relayed.usage, took_s=monotonic() - record.sent_s
            )
        elif relayed.failure is not None and relayed.failure not in OURS and not relayed.refused:
            self._registry.breakers.failed(instance.id, f"its answer ended early: {relayed.failure}")
        return relayed

    def _begun(self, instance: Instance, status: int, *, after_s: float) -> None:
        """Tell the registry what kind of answer begins, and admission whether the instance has enough to do. A 500 may
        be the request's own fault: what it says will tell.
        """
        if status in _TOO_BUSY:
            self._admission.capacity.overloaded(instance)
        elif status < INTERNAL_SERVER_ERROR:
            self._admission.capacity.answered(instance, after_s=after_s)
        if status in _INSTANCE_FAILED:
            self._registry.breakers.failed(instance.id, f"it answered {status}")
        elif status < INTERNAL_SERVER_ERROR:
            self._registry.breakers.answered(instance.id)

    def _answered(self, instance: Instance, status: int, relayed: Relayed) -> None:
        """Tell the registry of an error whose words are known now: a request's own fault is a good answer."""
        if status < INTERNAL_SERVER_ERROR or status in _INSTANCE_FAILED:
            return
        if relayed.refused:
            self._registry.breakers.answered(instance.id)
        else:
            self._registry.breakers.answered_badly(instance.id, f"it answered {status}")

    def _note(self, instance: Instance, failure: UpstreamFailureError, *, since_s: float) -> None:
        """Tell the registry. A slow connection may be this process's own lag: only several in a row take one out."""
        if failure.kind is FailureKind.NO_FILES:
            return
        if failure.kind is FailureKind.CONNECT:
            self._registry.checks.connection_failed(instance.id, str(failure))
        elif failure.kind is FailureKind.CONNECT_TIMEOUT:
            self._registry.checks.failed(instance.id, str(failure), may_drain=True, since_s=since_s)
        else:
            self._registry.breakers.failed(instance.id, str(failure))
        if failure.kind in _OVERLOAD:
            self._admission.capacity.overloaded(instance)


async def _refuse(exchange: Exchange, error: ApiError, record: RequestRecord) -> None:
    if exchange.opening is not None and exchange.opening.waiting:
        await exchange.opening.end(error)
    elif not exchange.started:  # or it is a whole answer that its client doesn't take: the server ends the connection
        limits = () if error.headers else record.limits
        await exchange.refuse(error, [(b"x-request-id", record.request_id.encode()), *limits])


def _asked(call: Call) -> Asked:
    return Asked(call.operation, call.stream, call.answers, call.hide_usage)


def _engine_headers(exchange: Exchange, record: RequestRecord) -> list[Header]:
    headers = towards_engine(exchange.headers)
    headers.append((b"x-request-id", record.request_id.encode()))
    if exchange.header(b"content-type") is None:
        headers.append((b"content-type", b"application/json"))
    return headers


def _private(plan: Plan, tenant: Tenant, served_as: Priority, due_s: float) -> tuple[Header, ...]:
    """What an instance with ``/kv/v1`` is told of a request, and nobody else: the salt is a tenant's secret."""
    if not plan.instance.kv:
        return ()
    return (_SALT_HEADER, tenant.salt.encode()), *urgency_headers(served_as, due_in_s=due_s - monotonic())


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
            return UpstreamUnreachableError(str(failure))


__all__ = ["PATHS", "Limits", "Pipeline"]
