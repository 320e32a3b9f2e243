"""``/admin/v1/presets/{name}``: operators' presets beside the built-in ones.

A preset is written as a workload of ``kv_runtime_presets.yaml`` is, in JSON, and read by the same reader. That file
says what each key means; any preset can be read here as a beginning.
"""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response
from pydantic import BaseModel, Field

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import Mutation, MutationOf, etag, must
from gateway.api.admin.routes import admin_routes
from gateway.errors import ConflictApiError, InvalidRequestError, NotFoundError
from gateway.fleet.catalogue import RESERVED, PresetCatalogue
from gateway.state import Document, Kind, Put
from gateway.state.bodies import CURRENT_PRESET, NAME_PATTERN
from gateway.state.stored import field, fields
from kvcontrol.presets import PresetFileError, Presets, workload_form

PresetName = Annotated[str, Path(pattern=NAME_PATTERN, description="A preset's name, like long-context-32k.")]
Form = Annotated[
    dict[str, Any],
    Body(
        description="The keys of a workload of kv_runtime_presets.yaml; without not_measured, nothing is taken as "
        "measured.",
        examples=[{"summary": "our chats", "context_tokens": 16384, "ddr": {"size": "8GiB", "policy": "lru"}}],
    ),
]


class PresetForm(BaseModel):
    """A preset as it is written."""

    name: str
    shipped: bool = Field(description="Whether it comes along, and so can't be changed.")
    form: dict[str, Any]
    version: int | None = Field(None, description="Of one that was made here.")


def own_presets_router(changes: Changes, *, presets: PresetCatalogue) -> APIRouter:
    """Return the routes."""
    router = admin_routes("fleet")
    store = changes.store

    @router.get("/presets/{name}")
    async def get_form(name: PresetName, response: Response) -> PresetForm:
        """A preset as it is written: what ``PUT`` takes, under another name."""
        if name in presets.shipped.workloads:
            return PresetForm(name=name, shipped=True, form=workload_form(presets.shipped.workloads[name]))
        found = await store.document(Kind.WORKLOAD, name)
        if found is None:
            raise _missing(name)
        response.headers["etag"] = etag(found)
        return _shown(found)

    @router.put("/presets/{name}", response_model=PresetForm)
    async def put_form(name: PresetName, form: Form, mutation: MutationOf) -> Response:
        """Create or replace a preset. If it is the fleet's current one, its quota shares apply at once, and its
        policies when it is applied again.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        _check_changeable(presets, name)
        text = json.dumps({"not_measured": "all", **form}, ensure_ascii=False)
        try:
            text.encode()
            Presets.workload(name, text)
        except UnicodeEncodeError:
            raise InvalidRequestError("the preset holds half a surrogate pair", code="invalid_preset") from None
        except PresetFileError as error:
            reason = "; ".join(line.removeprefix(f"{name}:1: ") for line in str(error).splitlines())
            raise InvalidRequestError(reason, code="invalid_preset") from None
        present = await store.document(Kind.WORKLOAD, name)
        return await changes.apply(
            [Put(kind=Kind.WORKLOAD, name=name, body=text, expected=mutation.expected(present))],
            mutation=mutation,
            action=mutation.action("put", f"presets/{name}", form),
            status=200,
            shown=lambda documents: _shown(must(documents[0])).model_dump(mode="json"),
        )

    @router.delete("/presets/{name}", status_code=204)
    async def delete_form(name: PresetName, mutation: MutationOf) -> Response:
        """Take a preset away that was made here; not the fleet's current one."""
        _check_changeable(presets, name)
        await _refuse_current(changes, name, mutation)
        return await changes.delete(
            Kind.WORKLOAD, name, mutation=mutation, target=f"presets/{name}", missing=lambda: _missing(name)
        )

    return router


def _check_changeable(presets: PresetCatalogue, name: str) -> None:
    if name in presets.shipped.workloads:
        raise ConflictApiError(
            f"the preset {name!r} is shipped and can't be changed; choose another name", code="preset_shipped"
        )
    if name in RESERVED:
        raise ConflictApiError(
            f"the preset name {name!r} is reserved; choose another name", code="preset_name_reserved"
        )


async def _refuse_current(changes: Changes, name: str, mutation: Mutation) -> None:
    if await changes.replayed(mutation) is not None:
        return
    current = await changes.store.document(Kind.PRESET, CURRENT_PRESET)
    if current is not None and field(current, "name") == name:
        raise ConflictApiError(
            f"preset {name!r} is the fleet's current one: apply another preset, or DELETE /admin/v1/presets/current",
            code="preset_in_use",
        )


def _missing(name: str) -> NotFoundError:
    return NotFoundError(f"unknown preset {name!r}", code="preset_not_found")


def _shown(document: Document) -> PresetForm:
    return PresetForm(name=document.name, shipped=False, form=dict(fields(document)), version=document.version)
