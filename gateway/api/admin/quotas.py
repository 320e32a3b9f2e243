"""``/admin/v1/quotas``: quotas of tenants, and their usage."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from gateway.admission import QuotaMeter, QuotaUnavailableError
from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag
from gateway.api.admin.routes import admin_routes
from gateway.api.admin.tenants import TenantName
from gateway.api.admin.views import QuotaList, QuotaView, UsageView, quota_view
from gateway.errors import NoInstanceError, NotFoundError
from gateway.state import Kind
from gateway.state.bodies import DEFAULT_QUOTA, QuotaBody
from gateway.state.stored import readable
from gateway.types import TenantId

QuotaName = Annotated[
    str,
    Path(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}|_default)$",
        description=f"A tenant's name, or {DEFAULT_QUOTA} for those that have no quota of their own.",
    ),
]


def quotas_router(changes: Changes, meter: QuotaMeter) -> APIRouter:
    """Return the routes."""
    router = admin_routes("quotas")
    store = changes.store

    @router.get("/quotas")
    async def list_quotas() -> QuotaList:
        """All quotas."""
        return QuotaList(data=readable(quota_view, await store.documents(Kind.QUOTA)))

    @router.get("/quotas/{tenant}")
    async def get_quota(tenant: QuotaName, response: Response) -> QuotaView:
        """One tenant's quota."""
        found = await store.document(Kind.QUOTA, tenant)
        if found is None:
            raise _no_quota(tenant)
        response.headers["etag"] = etag(found)
        return quota_view(found)

    @router.put("/quotas/{tenant}", response_model=QuotaView)
    async def put_quota(tenant: QuotaName, body: QuotaBody, mutation: MutationOf) -> Response:
        """Set a tenant's quotas; they apply at once. KV budgets reach the engines within seconds."""
        return await changes.put(
            Kind.QUOTA, tenant, body, mutation=mutation, target=f"quotas/{tenant}", view=quota_view
        )

    @router.delete("/quotas/{tenant}", status_code=204)
    async def delete_quota(tenant: QuotaName, mutation: MutationOf) -> Response:
        """Take a quota back: the default's holds then, or no limit."""
        return await changes.delete(
            Kind.QUOTA, tenant, mutation=mutation, target=f"quotas/{tenant}", missing=lambda: _no_quota(tenant)
        )

    @router.get("/quotas/{tenant}/usage")
    async def usage(tenant: TenantName) -> UsageView:
        """What counts against a tenant's quota now; without a quota nothing is counted."""
        try:
            used = await meter.usage(TenantId(tenant))
        except QuotaUnavailableError as error:
            raise NoInstanceError(str(error), code="quotas_unavailable", retry_after_s=2) from None
        return UsageView(tenant=tenant, requests=used.requests, tokens=used.tokens, running=used.running)

    return router


def _no_quota(tenant: str) -> NotFoundError:
    return NotFoundError(f"tenant {tenant!r} has no quota of its own", code="quota_not_found")
