"""Routes for operators: liveness, readiness, version and metrics."""

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.operators import OperatorAccess
from gateway.http.shutdown import Shutdown
from gateway.problems import Problems
from gateway.registry import Registry
from gateway.telemetry import Metrics
from gateway.telemetry.siblings import Siblings
from gateway.version import installed_version


def ops_router(  # noqa: PLR0913 - wired once, by name
    *,
    registry: Registry,
    metrics: Metrics,
    problems: Problems,
    access: OperatorAccess,
    confirmed: Callable[[], bool],
    shutdown: Shutdown,
    siblings: Siblings | None = None,
) -> APIRouter:
    """Return the routes of operators: ``/metrics`` and what ``/readyz`` names are for them, the rest is for everybody.

    ``confirmed`` tells whether stored keys are accepted.
    """
    router = APIRouter()

    def is_ready() -> bool:
        answering = any(each.ready and each.answers for each in registry.all())
        return answering and confirmed() and not shutdown.begun

    def closing() -> dict[str, str] | None:
        return {"connection": "close"} if shutdown.begun else None

    _add_liveness(router)

    @router.get("/health")
    async def health() -> Response:
        """Return the status of ``/readyz`` without a body, as inference servers do."""
        return Response(status_code=200 if is_ready() else 503, headers=closing())

    @router.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        """Ready: at least one instance that answers is usable, and what it holds has been learned or was tried to be in
        vain. Not ready: this process is about to end, whatever else.
        """
        instances = registry.all()
        usable = sum(each.ready for each in instances)
        answering = any(each.ready and each.answers for each in instances)
        status = _status(confirmed=confirmed(), answering=answering, usable=usable)
        shown = instances if access.allows(request) else ()
        return JSONResponse(
            {
                "status": "draining: it is shutting down" if shutdown.begun else status,
                "usable": usable,
                "problems": {kind: count for kind, count in problems.counts().items() if count},
                "blocks_known": sum(each.blocks_known for each in instances),
                "instances": {
                    each.id: {"state": each.state, "reason": each.reason, "blocks": each.blocks} for each in shown
                },
            },
            status_code=200 if is_ready() else 503,
            headers=closing(),
        )

    _add_metrics(router, metrics, access, siblings)
    return router


def _add_liveness(router: APIRouter) -> None:
    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive: the event loop answers."""
        return {"status": "alive"}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of the gateway."""
        return {"version": installed_version()}


def _add_metrics(router: APIRouter, metrics: Metrics, access: OperatorAccess, siblings: Siblings | None) -> None:
    @router.get("/metrics")
    async def exposition(request: Request, worker: str | None = None) -> Response:
        """Prometheus text, or OpenMetrics (which has examples with trace ids) for a client that accepts it."""
        access.check(request)
        accept = request.headers.get("accept", "")
        series, content_type = metrics.exposition(accept)
        if siblings is not None and worker != "own":
            series = await siblings.exposition(series, accept, request.headers.get("authorization", ""))
        return Response(series, headers={"content-type": content_type})


def _status(*, confirmed: bool, answering: bool, usable: int) -> str:
    if not confirmed:
        return "stored keys can't be confirmed: the store is away"
    return "ready" if answering else "no usable instance answers" if usable else "no usable instance"
