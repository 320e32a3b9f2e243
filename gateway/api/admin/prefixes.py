"""``/admin/v1/prefixes``: prefixes that stay cached until they are unpinned, and prefixes that are to be forgotten."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Response

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, must
from gateway.api.admin.prefix_commands import PinPrefixBody, PrefixCommands
from gateway.api.admin.prefix_names import PrefixBody, PrefixNames
from gateway.api.admin.prefix_views import (
    InvalidatedView,
    InvalidateView,
    Outcome,
    PinList,
    PinView,
    PlaceView,
    UnpinView,
    failures,
)
from gateway.api.admin.routes import admin_routes
from gateway.errors import ConflictApiError, NotFoundError
from gateway.fleet.undo_note import NotedPin, UndoNote
from gateway.state import Delete, Kind, Put
from gateway.state.bodies import NAME_PATTERN
from gateway.state.fleet_bodies import PinBody
from gateway.state.stored import read, written
from kvcontrol.core.prefix_control import MOST_PINS

PinId = Annotated[str, Path(pattern=NAME_PATTERN, description="A pin, as the list has it.")]


def prefixes_router(changes: Changes, *, names: PrefixNames, commands: PrefixCommands) -> APIRouter:
    """Return the routes."""
    router = admin_routes("fleet")
    store = changes.store

    @router.get("/prefixes")
    async def list_pins() -> PinList:
        """Pinned prefixes, and the places of their blocks."""
        return await commands.shown(await store.documents(Kind.PIN))

    _add_pin(router, changes, names, commands)
    _add_unpin(router, changes, commands)
    _add_invalidate(router, changes, names, commands)
    return router


def _add_pin(router: APIRouter, changes: Changes, names: PrefixNames, commands: PrefixCommands) -> None:
    store = changes.store

    @router.post("/prefixes", response_model=PinView)
    async def pin(body: PinPrefixBody, mutation: MutationOf) -> Response:
        """Keep a prefix cached, whatever comes: its blocks that are there, and those that will be computed. Where no
        instances are named it is those that hold all of it, or the one that the next such prompt would go to.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        prefix = await names.read(body, whole=True)
        async with commands.lock:
            present = await store.document(Kind.PIN, prefix.name)
            expected = mutation.expected(present)
            if expected is not None and expected != (0 if present is None else present.version):
                raise mutation.stale(Kind.PIN, prefix.name, 0 if present is None else present.version)
            if present is None and len(await store.documents(Kind.PIN)) >= MOST_PINS:
                raise ConflictApiError(f"{MOST_PINS} prefixes are pinned, the most; unpin one first", code="pin_limit")
            before = None if present is None else read(PinBody, present)
            detail = {"model": body.model, "tenant": body.tenant, "tokens": prefix.tokens, "ttl_s": body.ttl_s}
            target = f"prefixes/{prefix.name}"
            names.candidates(body, prefix)  # a refusal is no operation
            async with changes.operation(mutation, "pin", target, detail) as operation:

                async def noted(pins: list[NotedPin]) -> None:
                    await changes.operations.note(operation, UndoNote(pins=pins))

                done = await commands.pin(body, prefix, before, noted=noted)
                outcome = "partly" if failures(done.places.values()) else "done"
                try:
                    return await changes.apply(
                        [Put(kind=Kind.PIN, name=prefix.name, body=written(done.stored, present), expected=expected)],
                        mutation=mutation,
                        action=mutation.action("pin", target, detail | _outcomes(done.places), outcome=outcome),
                        status=200,
                        shown=lambda documents: commands.view(must(documents[0]), done.places).model_dump(mode="json"),
                        operation=operation,
                    )
                except Exception:  # somebody else's change came first, or the store is away
                    await commands.take_back(done)
                    raise


def _add_unpin(router: APIRouter, changes: Changes, commands: PrefixCommands) -> None:
    store = changes.store

    @router.delete("/prefixes/{pin_id}", response_model=UnpinView)
    async def unpin(pin_id: PinId, mutation: MutationOf) -> Response:
        """Unpin a prefix. On an instance that can't be reached the lease expires."""
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        async with commands.lock:
            present = await store.document(Kind.PIN, pin_id)
            if present is None:
                raise NotFoundError(f"unknown pin {pin_id!r}", code="pin_not_found")
            expected = mutation.expected(present)
            if expected is not None and expected != present.version:
                raise mutation.stale(Kind.PIN, pin_id, present.version)
            target = f"prefixes/{pin_id}"
            async with changes.operation(
                mutation, "unpin", target
            ) as operation:  # where it fails, the keeper pins it again
                places = await commands.unpin(pin_id, read(PinBody, present))
                view = UnpinView(id=pin_id, instances=places, failed=failures(places.values()))
                outcome = "partly" if view.failed else "done"
                return await changes.apply(
                    [Delete(kind=Kind.PIN, name=pin_id, expected=present.version)],
                    mutation=mutation,
                    action=mutation.action("unpin", target, _outcomes(places), outcome=outcome),
                    status=200,
                    shown=lambda _: view.model_dump(mode="json"),
                    operation=operation,
                )


def _add_invalidate(router: APIRouter, changes: Changes, names: PrefixNames, commands: PrefixCommands) -> None:
    store = changes.store

    @router.post("/prefixes/invalidate", response_model=InvalidateView)
    async def invalidate(body: PrefixBody, mutation: MutationOf) -> Response:
        """Make instances forget a prefix in all tiers: of a prompt all its blocks, of a hash that block, and all that
        follows them, pinned or not. All instances of the model are meant unless some are named.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        prefix = await names.read(body, whole=False)
        async with commands.lock:
            stored = await store.documents(Kind.PIN)
            names.candidates(body, prefix)  # a refusal is no operation
            target, meant = f"prefixes/{prefix.name}", {"model": body.model, "tenant": body.tenant}
            async with changes.operation(
                mutation, "invalidate", target, meant, undone="partly"
            ) as operation:  # pins would stay
                views, ended = await commands.invalidate(body, prefix, stored)
                failed = failures(views.values())
                view = InvalidateView(instances=views, unpinned=[each.name for each in ended], failed=failed)
                forgot = any(each.outcome is Outcome.INVALIDATED for each in views.values())
                return await changes.apply(
                    ended,
                    mutation=mutation,
                    action=mutation.action(
                        "invalidate",
                        target,
                        meant | {"unpinned": view.unpinned} | _outcomes(views),
                        outcome="done" if not failed else "partly" if forgot else "failed",
                    ),
                    status=200,
                    shown=lambda _: view.model_dump(mode="json"),
                    operation=operation,
                )


def _outcomes(views: Mapping[str, PlaceView | InvalidatedView]) -> dict[str, dict[str, str]]:
    return {"instances": {name: each.outcome.value for name, each in views.items()}}
