"""The record of one request in progress; owned by the pipeline, completed once."""

from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Self

from gateway.fingerprint import Fingerprint, Gap
from gateway.http.status import BAD_REQUEST, INTERNAL_SERVER_ERROR
from gateway.placement.planner import Plan
from gateway.types import Operation, RequestId, TenantId, Usage
from gateway.upstream.relay import CANCELLED, DEADLINE, SHUTDOWN, Relayed

if TYPE_CHECKING:
    from gateway.telemetry.tracing import RequestTrace

_CLIENT_LEFT = 499


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # 4xx, the gateway's or the engine's
    REFUSED = "refused"  # 503 by the gateway: no instance
    SHED = "shed"  # 429 by the gateway: a quota is used up, or it is saturated
    UPSTREAM_ERROR = "upstream_error"  # the engine answered 5xx, failed, or died within its answer
    DEADLINE = "deadline"  # the time that the request may take was over, wherever it was spent
    CANCELLED = "cancelled"  # the client went away, or an operator or the gateway's own end cut it off
    GATEWAY_ERROR = "gateway_error"  # a bug here

    @classmethod
    def of_status(cls, status: int) -> Self:
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            return cls("refused")
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return cls("shed")
        return cls("client_error" if status < INTERNAL_SERVER_ERROR else "upstream_error")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are monotonic seconds; ``received_s`` to ``admitted_s`` are the ends of its steps. ``trace`` is there where
    traces are made; ``trace_id`` is that one's, otherwise what the client's ``traceparent`` says. ``route``, ``sent_s``
    and ``answering_s`` (its answering instance is asked) are the last attempt's, ``limits`` the headers about the
    tenant's quota; ``overestimated_tokens`` were expected in its instance's cache and not found there.
    """

    operation: Operation
    request_id: RequestId
    started_s: float
    trace_id: str | None = None
    trace: "RequestTrace | None" = None
    received_s: float | None = None
    parsed_s: float | None = None
    fingerprinted_s: float | None = None
    admitted_s: float | None = None
    tenant: TenantId | None = None
    model: str | None = None
    stream: bool = False
    status: int | None = None
    outcome: Outcome | None = None
    detail: str | None = None
    prompt_tokens: int | None = None
    plan: Plan | None = None
    attempts: int = 0
    route: str = ""
    sent_s: float = 0.0
    answering_s: float | None = None
    first_byte_s: float | None = None
    overestimated_tokens: int = 0
    usage: Usage | None = None
    limits: tuple[tuple[bytes, bytes], ...] = ()

    def fingerprinted(self, fingerprint: Fingerprint | Gap) -> None:
        """Its prompt is known as far as it will be."""
        self.fingerprinted_s = monotonic()
        if isinstance(fingerprint, Fingerprint) and fingerprint.gap is None:
            self.prompt_tokens = fingerprint.tokens

    def planned(self, plan: Plan) -> None:
        self.attempts += 1
        self.sent_s = monotonic()
        self.answering_s = None
        self.plan = plan
        self.route = plan.route(self.attempts)
        if self.trace is not None:
            self.trace.planned(plan)

    def answering(self) -> float:
        """What comes before the answer is done; return the time at which its instance is asked."""
        now_s = monotonic()
        if self.trace is not None:
            self.trace.answering(now_s)
        self.answering_s = now_s
        return now_s

    def tried_in_vain(self, cause: str) -> None:
        """Its attempt failed, and another one follows."""
        if self.trace is not None:
            self.trace.failed(cause, monotonic())

    def client_left(self) -> None:
        """It ends with nobody to answer; a status that it never got is called what nginx calls it."""
        self.outcome = Outcome.CANCELLED
        self.status = self.status or _CLIENT_LEFT

    def relayed(self, relayed: Relayed) -> None:
        self.status = relayed.status
        self.usage = relayed.usage
        self.detail = relayed.failure
        if relayed.failure == DEADLINE:
            self.outcome = Outcome.DEADLINE
        elif relayed.failure in {CANCELLED, SHUTDOWN}:
            self.outcome = Outcome.CANCELLED
        elif relayed.refused:
            self.outcome = Outcome.CLIENT_ERROR
        elif relayed.failure is not None or relayed.status >= INTERNAL_SERVER_ERROR:
            self.outcome = Outcome.UPSTREAM_ERROR
        elif relayed.status >= BAD_REQUEST:
            self.outcome = Outcome.CLIENT_ERROR
        else:
            self.outcome = Outcome.OK
