"""``/admin/v1/tenants``."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Response

from gateway.admission import Authenticator
from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag
from gateway.api.admin.routes import admin_routes
from gateway.api.admin.views import TenantList, TenantView, tenant_view
from gateway.errors import NotFoundError
from gateway.state import Change, Delete, Kind, Put
from gateway.state.bodies import NAME_PATTERN, TenantBody
from gateway.state.revocation import is_revoked, revoked
from gateway.state.stored import field, readable

TenantName = Annotated[str, Path(pattern=NAME_PATTERN, description="A tenant's name.")]


def tenants_router(changes: Changes, authenticator: Authenticator, *, clock: Callable[[], float]) -> APIRouter:
    """Return the routes."""
    router = admin_routes("tenants")
    store = changes.store

    @router.get("/tenants")
    async def list_tenants() -> TenantList:
        """All tenants that the store knows, and those of the settings' keys, which need no entry here."""
        return TenantList(
            data=readable(tenant_view, await store.documents(Kind.TENANT)), configured=sorted(authenticator.configured)
        )

    @router.get("/tenants/{name}")
    async def get_tenant(name: TenantName, response: Response) -> TenantView:
        """One tenant."""
        found = await store.document(Kind.TENANT, name)
        if found is None:
            raise no_tenant(name)
        response.headers["etag"] = etag(found)
        return tenant_view(found)

    @router.put("/tenants/{name}", response_model=TenantView)
    async def put_tenant(name: TenantName, body: TenantBody, mutation: MutationOf) -> Response:
        """Create or replace a tenant."""
        return await changes.put(Kind.TENANT, name, body, mutation=mutation, target=f"tenants/{name}", view=tenant_view)

    _add_delete(router, changes, clock)
    return router


def _add_delete(router: APIRouter, changes: Changes, clock: Callable[[], float]) -> None:
    store = changes.store

    @router.delete("/tenants/{name}", status_code=204)
    async def delete_tenant(name: TenantName, mutation: MutationOf) -> Response:
        """Forget a tenant, its quota and its pinned prefixes, and revoke its keys.

        Keys and prefixes that this version can't read are among them.
        """

        async def attempt() -> Response:
            if (replayed := await changes.replayed(mutation)) is not None:
                return replayed
            present = await store.document(Kind.TENANT, name)
            if present is None:
                raise no_tenant(name)
            gone: list[Change] = [Delete(kind=Kind.TENANT, name=name, expected=mutation.expected(present))]
            quota = await store.document(Kind.QUOTA, name)
            if quota is not None:
                gone.append(Delete(kind=Kind.QUOTA, name=name, expected=quota.version))
            gone += [
                Delete(kind=Kind.PIN, name=each.name, expected=each.version)
                for each in await store.documents(Kind.PIN)
                if field(each, "tenant") == name
            ]
            keys = []
            for document in await store.documents(Kind.KEY):
                if field(document, "tenant") == name and not is_revoked(document):
                    body = revoked(document, clock())
                    gone.append(Put(kind=Kind.KEY, name=document.name, body=body, expected=document.version))
                    keys.append(document.name)
            return await changes.apply(
                gone,
                mutation=mutation,
                action=mutation.action("delete", f"tenants/{name}", {"revoked_keys": keys}),
                status=204,
                shown=lambda _: None,
            )

        return await changes.carried_out(attempt)


def no_tenant(name: str) -> NotFoundError:
    """Return the 404 for a tenant that isn't there."""
    return NotFoundError(f"unknown tenant {name!r}", code="tenant_not_found")
