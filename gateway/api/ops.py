"""For operators: is it alive, is it ready, what does it measure, how does it look."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from gateway.dashboard import status_page
from gateway.planner import Planner
from gateway.registry import LoadTracker, Registry
from gateway.telemetry import Metrics, Telemetry
from gateway.telemetry.siblings import Siblings
from kvcontrol.prefix_reuse import FleetIndex


def ops_router(  # noqa: PLR0913 - wired once, by name
    *,
    registry: Registry,
    load: LoadTracker,
    index: FleetIndex,
    planner: Planner,
    metrics: Metrics,
    telemetry: Telemetry,
    siblings: Siblings | None = None,
) -> APIRouter:
    """Return ``/healthz``, ``/readyz``, ``/metrics`` and ``/dashboard``."""
    router = APIRouter()

    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Alive: the event loop answers."""
        return {"status": "alive"}

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Ready: at least one instance is usable, and what it holds has been learned or was tried to be in vain."""
        instances = registry.all()
        usable = sum(each.ready for each in instances)
        return JSONResponse(
            {
                "status": "ready" if usable else "no usable instance",
                "usable": usable,
                "blocks_known": sum(each.blocks_known for each in instances),
                "instances": {
                    each.id: {"state": each.state, "reason": each.reason, "blocks": each.blocks} for each in instances
                },
            },
            status_code=200 if usable else 503,
        )

    @router.get("/metrics")
    async def exposition(request: Request, worker: str | None = None) -> Response:
        """Prometheus text, or OpenMetrics (which has examples with trace ids) for a client that accepts it."""
        accept = request.headers.get("accept", "")
        series, content_type = metrics.exposition(accept)
        if siblings is not None and worker != "own":
            series = await siblings.exposition(series, accept)
        return Response(series, headers={"content-type": content_type})

    @router.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> str:
        """The status page."""
        return status_page(registry, load, index, policy=planner.policy, outcomes=telemetry.outcomes)

    return router


__all__ = ["ops_router"]
