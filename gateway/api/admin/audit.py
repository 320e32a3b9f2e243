"""``/admin/v1/audit``: changes with their authors."""

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.api.admin.routes import admin_routes
from gateway.api.admin.views import AuditList, AuditView
from gateway.state import AuditEntry, Store
from gateway.state.json_object import json_object_in_part


def audit_router(store: Store) -> APIRouter:
    """Return the route."""
    router = admin_routes("audit")

    @router.get("/audit")
    async def audit(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[int | None, Query(ge=1, le=1 << 62, description="Only entries with lower numbers.")] = None,
    ) -> AuditList:
        """The log of changes, newest first. It holds no keys."""
        entries = await store.audit(limit=limit, before=before)
        return AuditList(
            data=[_view(each) for each in entries],
            next_before=entries[-1].number if len(entries) == limit else None,
        )

    return router


def _view(entry: AuditEntry) -> AuditView:
    action = entry.action
    return AuditView(
        number=entry.number,
        at_s=entry.at_s,
        actor=action.actor,
        action=action.action,
        target=action.target,
        outcome=action.outcome,
        detail=json_object_in_part(action.detail),
        request_id=action.request_id,
    )
