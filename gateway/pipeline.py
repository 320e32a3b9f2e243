"""THE request path, on one page: authenticate -> fingerprint -> admit -> match -> plan -> forward -> settle.

Each step is a component's; this file holds their order up to admission and who takes over when a step refuses. From
there ``execution.forward`` matches, plans and forwards, and every way a request can end is settled here.
"""

import random
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING

from gateway.admission import AdmissionController, Authenticator, keys_of
from gateway.errors import ApiError, DeadlineError, PlanCancelledError
from gateway.execution.forward import Admitted, Forwarder
from gateway.fingerprint import Unreadable
from gateway.http.body_memory import BodyReservation
from gateway.http.deadline import HEADER as TIMEOUT_HEADER
from gateway.http.deadline import Deadline, limit_of
from gateway.http.exchange import ClientGoneError, Exchange
from gateway.http.shutdown import Shutdown
from gateway.http.via import Via
from gateway.limits import SloClass
from gateway.registry import Registry
from gateway.requests.estimate import admission_of, admission_of_counting, size_of
from gateway.requests.paths import PATHS
from gateway.requests.reader import Reader, Received
from gateway.requests.tokens import TOKEN_OPERATIONS, TokenApi
from gateway.requests.unsupported import refuse_unsupported
from gateway.telemetry import Outcome, RequestRecord, Telemetry
from gateway.telemetry.trace_context import begin_trace
from gateway.types import Operation, RequestId, Tenant
from gateway.upstream import Opening
from gateway.upstream.relay import AnswerShape, scanner_for

if TYPE_CHECKING:
    from gateway.telemetry.tracing import RequestTracer

_ENDED = {DeadlineError: Outcome.DEADLINE, PlanCancelledError: Outcome.CANCELLED}
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_READ = Unreadable(reason="unknown_parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. ``waits_s`` bound its wait, here and in the engine, by its class."""

    request_timeout_s: float
    waits_s: Mapping[SloClass, float]
    stream_ping_s: float
    expected_output_tokens: int


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
        forwarder: Forwarder,
        registry: Registry,
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
        self._forwarder = forwarder
        self._checks = registry.checks
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
        reserved: BodyReservation | None = None
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
            reserved = self._reader.reserve_body(tenant)
            with deadline:
                received = await self._reader.receive(exchange, reserved)
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
            if reserved is not None:
                reserved.give_back()
            self._telemetry.settle(record)

    async def _answer(
        self, exchange: Exchange, received: Received, tenant: Tenant, record: RequestRecord, deadline: Deadline
    ) -> None:
        """Parse a request, admit it, and let an instance answer it."""
        with await self._reader.hold(tenant, received) as held:
            body = received.body if received.coding is None else await self._reader.decoded(received, tenant)
            call = await self._reader.parse(record.operation, body, tenant)
            record.stream = call.stream
            if self._checks.unchecked:
                await self._checks.until_checked(call.model)
            refuse_unsupported(call, self._admission.candidates(call.model))
            record.model = call.model  # only a name that exists gets into the log
            record.parsed_s = monotonic()
            fingerprint = await self._reader.fingerprint(call, tenant, exchange.header(b"x-session-id"))
            record.fingerprinted(fingerprint)
            request = admission_of(
                tenant, call, fingerprint, expected_output_tokens=self._limits.expected_output_tokens
            )
            call = call._replace(prompt=_READ)  # what was made of a long body is let go
            received.reserved.keep(len(received.body) + len(call.body))
            with await self._admission.admit(request, held) as slot:
                deadline.check()
                record.admitted_s = monotonic()
                record.limits = slot.headers
                shape = AnswerShape(call.operation, call.stream, call.answers, call.hide_usage)
                opening = exchange.opening = self._opening(exchange, shape) if call.stream else None
                size = size_of(call, request, record.request_id)
                due_s = record.started_s + self._limits.waits_s[tenant.limits.slo]
                admitted = Admitted(tenant, fingerprint, slot, deadline, size, shape, due_s, opening)
                await self._forwarder.forward(exchange, call, admitted, record)

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
        with await self._admission.admit_without_instance(admission_of_counting(tenant)) as slot:
            deadline.check()
            record.limits = slot.headers
            slot.began()
            body = received.body if received.coding is None else await self._reader.decoded(received, tenant)
            record.model, answer = await tokens.answer(record.operation, body, tenant)
            received.reserved.keep(len(received.body) + len(body) + len(answer))
            record.status, record.outcome = HTTPStatus.OK, Outcome.OK
            await exchange.reply(HTTPStatus.OK, answer, [(b"x-request-id", record.request_id.encode()), *record.limits])

    def _opening(self, exchange: Exchange, shape: AnswerShape) -> Opening:
        """Return what shows a streaming client that the gateway waits for an instance."""
        return Opening(
            exchange, scanner_for(shape), dialect=shape.operation.dialect, after_s=self._limits.stream_ping_s
        )

    def _request_id(self, exchange: Exchange) -> RequestId:
        given = exchange.header(b"x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            return RequestId(given.decode())
        return RequestId(f"{self._names.getrandbits(128):032x}")


async def _refuse(exchange: Exchange, error: ApiError, record: RequestRecord) -> None:
    if exchange.opening is not None and exchange.opening.waiting:
        await exchange.opening.end(error)
    elif not exchange.started:  # or it is a whole answer that its client doesn't take: the server ends the connection
        limits = () if error.headers else record.limits
        await exchange.refuse(error, [(b"x-request-id", record.request_id.encode()), *limits])
