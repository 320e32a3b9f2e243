"""``/dashboard``: the status page, its files, and its data without the admin key."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway.api.operators import OperatorAccess
from gateway.dashboard import Asset, Assets, FleetBoard, FleetView
from gateway.errors import NotFoundError
from gateway.errors.unknown_route import unknown_route


def dashboard_router(assets: Assets, board: FleetBoard, access: OperatorAccess) -> APIRouter:
    """Return the routes; ``access`` is checked before the fleet is shown."""
    router = APIRouter()

    @router.get("/dashboard", response_class=Response)
    async def page(request: Request) -> Response:
        """The status page."""
        return _answer(assets.page, request)

    @router.get("/dashboard/", include_in_schema=False)
    async def elsewhere() -> Response:
        return RedirectResponse("/dashboard", status_code=308)

    @router.get("/dashboard/fleet")
    async def fleet(request: Request, response: Response) -> FleetView:
        """The data of the page before sign-in."""
        access.check(request)
        response.headers["cache-control"] = "no-store"
        return board.view()

    @router.get("/dashboard/{name:path}", include_in_schema=False)
    async def asset(name: str, request: Request) -> Response:
        found = assets.get(name)
        if found is None:
            raise NotFoundError(unknown_route(f"/dashboard/{name}"), code="unknown_route")
        return _answer(found, request)

    return router


def _answer(asset: Asset, request: Request) -> Response:
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known:
        return Response(status_code=304, headers=dict(asset.headers))
    return Response(asset.body, headers=dict(asset.headers))
