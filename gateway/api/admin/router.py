"""All of ``/admin/v1``, and how its failures look."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from gateway.admission import Authenticator, QuotaMeter
from gateway.api.admin.audit import audit_router
from gateway.api.admin.changes import Changes, store_unavailable
from gateway.api.admin.keys import keys_router
from gateway.api.admin.quotas import quotas_router
from gateway.api.admin.tenants import tenants_router
from gateway.errors import ApiError, ConflictApiError, InvalidRequestError
from gateway.state import OperationBusyError, OperationLostError, StoreUnavailableError
from gateway.state.shared_clock import SharedClock
from gateway.state.stored import UnreadableDocumentError


def admin_routers(
    *,
    changes: Changes,
    authenticator: Authenticator,
    meter: QuotaMeter,
    clock: SharedClock,
    more: Sequence[APIRouter] = (),
) -> Sequence[APIRouter]:
    """Return the routes of each resource; ``more`` are the resources of other packages."""
    return (
        tenants_router(changes, authenticator, clock=clock),
        keys_router(changes, authenticator, clock=clock),
        quotas_router(changes, meter),
        audit_router(changes.store),
        *more,
    )


def add_failure_handlers(app: FastAPI) -> None:
    """Make every refusal of FastAPI's routes leave as OpenAI's envelope."""
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(StoreUnavailableError, _unavailable)
    app.add_exception_handler(UnreadableDocumentError, _unreadable)
    app.add_exception_handler(OperationBusyError, _busy)
    app.add_exception_handler(OperationLostError, _lost)
    app.add_exception_handler(RequestValidationError, _invalid)


async def _refused(request: Request, error: Exception) -> Response:
    del request
    if not isinstance(error, ApiError):
        raise error
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in error.headers}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:  # noqa: PLR2004 - RFC 9110: a 401 names the scheme
        headers["www-authenticate"] = "Bearer"
    if error.status in {408, 413}:
        headers["connection"] = "close"
    return Response(error.body(), status_code=error.status, headers=headers, media_type="application/json")


async def _unavailable(request: Request, error: Exception) -> Response:
    if not isinstance(error, StoreUnavailableError):
        raise error
    return await _refused(request, store_unavailable(error))


async def _lost(request: Request, error: Exception) -> Response:
    if not isinstance(error, OperationLostError):
        raise error
    return await _refused(
        request, ConflictApiError(f"{error}; read the present state and try again", code="operation_lost")
    )


async def _busy(request: Request, error: Exception) -> Response:
    if not isinstance(error, OperationBusyError):
        raise error
    busy = ConflictApiError(
        f"another gateway is changing policies: {error}; try again", code="policy_change_under_way", retry_after_s=2
    )
    return await _refused(request, busy)


async def _unreadable(request: Request, error: Exception) -> Response:
    if not isinstance(error, UnreadableDocumentError):
        raise error
    message = f"{error}; replace it with PUT, or use a gateway of the version that wrote it"
    return await _refused(request, ConflictApiError(message, code="document_unreadable"))


async def _invalid(request: Request, error: Exception) -> Response:
    """FastAPI's list of problems as one message; values are not repeated, one might be a key."""
    if not isinstance(error, RequestValidationError):
        raise error
    problems = [
        (".".join(map(str, each["loc"][1:])) or str(each["loc"][0]), each["msg"].removeprefix("Value error, "))
        for each in error.errors()
    ]
    message = "; ".join(f"{where}: {what}" for where, what in problems[:5])
    return await _refused(request, InvalidRequestError(message, param=problems[0][0]))
