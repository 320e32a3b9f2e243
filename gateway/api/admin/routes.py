"""What all routes of ``/admin/v1`` have in common: prefix, key, and how their failures are described."""

from typing import Any

from fastapi import APIRouter, Security
from fastapi.security import HTTPBearer

from gateway.api.admin.access import AdminRoute
from gateway.api.admin.views import ErrorView

_FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorView, "description": "The request is invalid; the message contains the allowed values."},
    **{
        status: {
            "description": description,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorView.__name__}"}}},
        }
        for status, description in {
            401: "No admin key, or another one.",
            404: "Unknown resource.",
            408: "The body did not arrive in time.",
            409: "Another change came first.",
            412: "If-Match or If-None-Match does not hold.",
            413: "The body is too long.",
            422: "The Idempotency-Key was used for another request.",
            503: "The store, Redis or an instance can't be used now.",
        }.items()
    },
}
"""One names the model, the others refer to it: FastAPI builds a serializer for each model of each route."""
_KEY = HTTPBearer(auto_error=False, scheme_name="admin key", description="The admin key; AdminRoute checks it.")


def admin_routes(tag: str, route_class: type[AdminRoute] = AdminRoute) -> APIRouter:
    """Return a router for the routes of one resource.

    The application takes its routes as they are: one included in another router would build each of them again.
    """
    return APIRouter(
        prefix="/admin/v1", responses=_FAILURES, dependencies=[Security(_KEY)], route_class=route_class, tags=[tag]
    )
