"""``/admin/v1/keys``: made, shown once, revoked."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from gateway.admission import Authenticator
from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag, must
from gateway.api.admin.routes import admin_routes
from gateway.api.admin.tenants import no_tenant
from gateway.api.admin.views import KeyList, KeyView, NewKeyBody, NewKeyView, key_view, revoked_view
from gateway.errors import NotFoundError
from gateway.state import ABSENT, Kind, Put, make_key
from gateway.state.bodies import NAME_PATTERN, KeyBody
from gateway.state.revocation import revoked
from gateway.state.stored import field, readable, written
from gateway.types import TenantId

KeyId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$", description="A key's id, not the key.")]


def keys_router(changes: Changes, authenticator: Authenticator, *, clock: Callable[[], float]) -> APIRouter:
    """Return the routes."""
    router = admin_routes("keys")
    store = changes.store

    @router.get("/keys")
    async def list_keys(
        tenant: Annotated[str | None, Query(pattern=NAME_PATTERN, description="Only this tenant's.")] = None,
    ) -> KeyList:
        """Keys of all tenants or of one, never the keys themselves; of the settings' keys the tenants alone."""
        keys = readable(key_view, await store.documents(Kind.KEY))
        return KeyList(
            data=[each for each in keys if tenant in {None, each.tenant}],
            configured=[each for each in authenticator.configured_keys if tenant in {None, each}],
        )

    @router.get("/keys/{key_id}")
    async def get_key(key_id: KeyId, response: Response) -> KeyView:
        """One key."""
        found = await store.document(Kind.KEY, key_id)
        if found is None:
            raise _no_key(key_id)
        response.headers["etag"] = etag(found)
        return key_view(found)

    @router.post("/keys", status_code=201, response_model=NewKeyView)
    async def post_key(body: NewKeyBody, mutation: MutationOf) -> Response:
        """Create a key. Only this answer contains it; the first key ends the open mode permanently."""
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        if await store.document(Kind.TENANT, body.tenant) is None and not authenticator.knows(TenantId(body.tenant)):
            raise no_tenant(body.tenant)
        made = make_key()
        kept = KeyBody(
            tenant=body.tenant,
            digest=authenticator.digest(made.key),
            note=body.note,
            expires_at_s=None if body.expires_in_s is None else clock() + body.expires_in_s,
        )
        put = Put(kind=Kind.KEY, name=made.key_id, body=written(kept), expected=ABSENT)
        return await changes.apply(
            [put],
            mutation=mutation,
            action=mutation.action("create", f"keys/{made.key_id}", {"tenant": body.tenant, "note": body.note}),
            status=201,
            shown=lambda documents: {**key_view(must(documents[0])).model_dump(mode="json"), "key": None},
            secret={"key": made.key},
        )

    _add_revoke(router, changes, clock)
    return router


def _add_revoke(router: APIRouter, changes: Changes, clock: Callable[[], float]) -> None:
    store = changes.store

    @router.delete("/keys/{key_id}", response_model=KeyView)
    async def revoke_key(key_id: KeyId, mutation: MutationOf) -> Response:
        """Revoke a key: refused from now on, here at once and at other gateways within ``store_poll_s``.

        A key that this version can't read is revoked all the same.
        """

        async def attempt() -> Response:
            if (replayed := await changes.replayed(mutation)) is not None:
                return replayed
            present = await store.document(Kind.KEY, key_id)
            if present is None:
                raise _no_key(key_id)
            put = Put(
                kind=Kind.KEY,
                name=key_id,
                body=revoked(present, clock()),
                expected=mutation.expected_as_read(present),
            )
            return await changes.apply(
                [put],
                mutation=mutation,
                action=mutation.action("revoke", f"keys/{key_id}", {"tenant": field(present, "tenant")}),
                status=200,
                shown=lambda documents: revoked_view(must(documents[0])).model_dump(mode="json"),
            )

        return await changes.carried_out(attempt)


def _no_key(key_id: str) -> NotFoundError:
    return NotFoundError(f"unknown key {key_id!r}", code="key_not_found")
