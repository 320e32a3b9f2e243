"""Reports to registry and admission how requests end at an instance."""

from http import HTTPStatus
from typing import Final

from gateway.admission import AdmissionController
from gateway.http.status import INTERNAL_SERVER_ERROR
from gateway.registry import Instance, Registry
from gateway.upstream import FailureKind, Relayed, UpstreamFailureError
from gateway.upstream.relay import OURS

_OVERLOAD: Final = frozenset({FailureKind.CONNECT_TIMEOUT, FailureKind.FIRST_BYTE_TIMEOUT, FailureKind.HUNG})
_TOO_BUSY: Final = frozenset({int(HTTPStatus.TOO_MANY_REQUESTS), int(HTTPStatus.SERVICE_UNAVAILABLE)})
_INSTANCE_FAILED: Final = frozenset(
    {int(HTTPStatus.BAD_GATEWAY), int(HTTPStatus.SERVICE_UNAVAILABLE), int(HTTPStatus.GATEWAY_TIMEOUT)}
)


class InstanceReports:
    """Decides which results count for or against an instance; one object for all requests."""

    def __init__(self, *, registry: Registry, admission: AdmissionController) -> None:
        self._breakers = registry.breakers
        self._checks = registry.checks
        self._capacity = admission.capacity

    def began(self, instance: Instance, status: int, *, after_s: float) -> None:
        """Report what kind of answer begins, and whether the instance has enough to do. A 500 may be the request's own
        fault: ``ended`` decides that.
        """
        if status in _TOO_BUSY:
            self._capacity.overloaded(instance)
        elif status < INTERNAL_SERVER_ERROR:
            self._capacity.answered(instance, after_s=after_s)
        if status in _INSTANCE_FAILED:
            self._breakers.failed(instance.id, f"it answered {status}")
        elif status < INTERNAL_SERVER_ERROR:
            self._breakers.answered(instance.id)

    def ended(self, instance: Instance, status: int, relayed: Relayed) -> None:
        """Report an answer that was relayed: an error whose text shows a fault of the request is a good answer, one
        that ended early by the instance's fault is a failure.
        """
        if status >= INTERNAL_SERVER_ERROR and status not in _INSTANCE_FAILED:
            if relayed.refused:
                self._breakers.answered(instance.id)
            else:
                self._breakers.answered_badly(instance.id, f"it answered {status}")
        if relayed.failure is not None and relayed.failure not in OURS and not relayed.refused:
            self._breakers.failed(instance.id, f"its answer ended early: {relayed.failure}")

    def failed(self, instance: Instance, failure: UpstreamFailureError, *, since_s: float) -> None:
        """Report a failure. A slow connection may be this process's own lag: only several in a row take one out."""
        if failure.kind is FailureKind.NO_FILES:
            return
        if failure.kind is FailureKind.CONNECT:
            self._checks.connection_failed(instance.id, str(failure))
        elif failure.kind is FailureKind.CONNECT_TIMEOUT:
            self._checks.failed(instance.id, str(failure), may_drain=True, since_s=since_s)
        else:
            self._breakers.failed(instance.id, str(failure))
        if failure.kind in _OVERLOAD:
            self._capacity.overloaded(instance)
