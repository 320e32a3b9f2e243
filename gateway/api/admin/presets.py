"""``/admin/v1/presets``: built-in presets, the fleet's preset, and settings that need a restart."""

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag, must
from gateway.api.admin.policies import exclusively
from gateway.api.admin.routes import admin_routes
from gateway.errors import ConflictApiError, InvalidRequestError, NotFoundError
from gateway.fleet import InstanceControlError, Policy, PolicySwap, SwapReport
from gateway.fleet.catalogue import PresetCatalogue
from gateway.fleet.policies import Noted
from gateway.fleet.presets import Value, differences, hot_values, start_values, wanted_policies
from gateway.registry import Instance, Registry
from gateway.state import Change, Document, Kind, Put
from gateway.state.bodies import CURRENT_PRESET, NAME_PATTERN, PolicyBody, PresetBody
from gateway.state.stored import read, written
from kvcontrol.presets import Preset, UnknownPresetError

PresetName = Annotated[str, Path(pattern=NAME_PATTERN, description="A preset's name, like long-context-32k.")]
HardwareName = Annotated[str, Path(pattern=NAME_PATTERN, description="Hardware, like nvidia-h100.")]


class PresetSummary(BaseModel):
    """A preset: a kind of traffic."""

    name: str
    summary: str
    shipped: bool = Field(description="Whether it comes along; others were made here.")


class PresetList(BaseModel):
    """All presets, and the hardware that each can be merged with."""

    object: Literal["list"] = "list"
    data: list[PresetSummary]
    hardware: list[str]


class PresetView(BaseModel):
    """A preset on hardware: settings for running instances, and settings that need a restart."""

    name: str
    hardware: str
    hot: dict[str, Value]
    at_start: dict[str, Value]
    notes: list[str]
    not_measured: list[str] = Field(description="Keys whose values were not measured on this hardware.")


class DifferenceView(BaseModel):
    """A value of an instance's start, and the preset's value."""

    present: Value
    wanted: Value


class CurrentPresetView(PresetView):
    """The preset that the fleet is to be; ``restart`` names what each instance was started without."""

    version: int
    updated_at_s: float = Field(description="Seconds since 1970.")
    restart: dict[str, dict[str, DifferenceView]]


def presets_router(changes: Changes, *, presets: PresetCatalogue, registry: Registry, swap: PolicySwap) -> APIRouter:
    """Return the routes."""
    router = admin_routes("fleet")
    store = changes.store

    @router.get("/presets")
    async def list_presets() -> PresetList:
        """All presets."""
        return PresetList(
            data=[
                PresetSummary(name=name, summary=each.summary, shipped=not presets.is_own(name))
                for name, each in presets.all().workloads.items()
            ],
            hardware=list(presets.all().hardware),
        )

    @router.get("/presets/current")
    async def get_current(response: Response) -> CurrentPresetView:
        """The preset that was applied last, and which instances were started otherwise."""
        found = await store.document(Kind.PRESET, CURRENT_PRESET)
        if found is None:
            raise _none()
        response.headers["etag"] = etag(found)
        return _current(presets, registry, found)

    @router.get("/presets/{name}/{hardware}")
    async def get_preset(name: PresetName, hardware: HardwareName) -> PresetView:
        """A preset on hardware."""
        try:
            return _view(presets.all().preset(name, hardware))
        except UnknownPresetError as error:
            raise NotFoundError(str(error), code="preset_not_found") from None

    _add_apply(router, changes, presets, registry, swap)
    return router


def _add_apply(
    router: APIRouter, changes: Changes, presets: PresetCatalogue, registry: Registry, swap: PolicySwap
) -> None:
    store = changes.store

    @router.put("/presets/current", response_model=CurrentPresetView)
    async def put_current(body: PresetBody, mutation: MutationOf) -> Response:
        """Apply a preset: its tiers' eviction policies are swapped on all instances that have them, or on none, its
        quota shares are told for tenants without a KV budget of their own, and the answer says what needs a restart.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        preset = _merged(presets, body)
        async with exclusively(swap):
            present = await store.document(Kind.PRESET, CURRENT_PRESET)
            wanted = mutation.expected(present)
            if wanted is not None and wanted != (0 if present is None else present.version):
                raise mutation.stale(Kind.PRESET, CURRENT_PRESET, 0 if present is None else present.version)
            detail, target = body.model_dump(mode="json"), f"presets/{body.name}"
            async with changes.operation(mutation, "apply", target, detail, undone="rolled_back") as operation:
                noted = partial(changes.operations.note_policies, operation)
                swapped: list[_Swapped] = []
                try:
                    await _swap_all(swap, registry.reporting(), wanted_policies(preset), noted=noted, done=swapped)
                    puts: list[Change] = [
                        Put(kind=Kind.PRESET, name=CURRENT_PRESET, body=written(body, present), expected=wanted)
                    ]
                    puts += [
                        Put(kind=Kind.POLICY, name=policy.kind, body=written(PolicyBody(name=policy.name)))
                        for policy, _, _ in swapped
                    ]
                    return await changes.apply(
                        puts,
                        mutation=mutation,
                        action=mutation.action("apply", target, detail),
                        status=200,
                        shown=lambda documents: _current(presets, registry, must(documents[0])).model_dump(mode="json"),
                        operation=operation,
                    )
                except Exception:
                    operation.unfinished = not await _roll_back(swap, swapped)
                    raise

    @router.delete("/presets/current", status_code=204)
    async def delete_current(mutation: MutationOf) -> Response:
        """Forget the preset: its quota shares are taken back, the policy stays."""
        return await changes.delete(
            Kind.PRESET, CURRENT_PRESET, mutation=mutation, target="presets/current", missing=_none
        )


def _merged(presets: PresetCatalogue, body: PresetBody) -> Preset:
    try:
        return presets.all().preset(body.name, body.hardware)
    except UnknownPresetError as error:
        raise InvalidRequestError(str(error)) from None


def _current(presets: PresetCatalogue, registry: Registry, document: Document) -> CurrentPresetView:
    preset = _merged(presets, read(PresetBody, document))
    restart = {
        str(each.id): {
            key: DifferenceView(present=one.present, wanted=one.wanted)
            for key, one in differences(each.stats, preset).items()
        }
        for each in registry.reporting()
        if each.stats is not None
    }
    return CurrentPresetView(
        **dict(_view(preset)), version=document.version, updated_at_s=document.updated_at_s, restart=restart
    )


_Swapped = tuple[Policy, tuple[Instance, ...], SwapReport]


async def _swap_all(
    swap: PolicySwap,
    instances: tuple[Instance, ...],
    policies: tuple[Policy, ...],
    *,
    noted: Noted,
    done: list[_Swapped],
) -> None:
    """Swap each policy on the instances that have its kind, and add each change to ``done``; raises
    ``ConflictApiError`` after one that failed.
    """
    kinds = {each.id: await _kinds(swap, each) for each in instances}
    for policy in policies:
        having = tuple(each for each in instances if policy.kind in kinds[each.id])
        if not having:
            continue
        report = await swap.swap(having, policy, noted=noted)
        done.append((policy, having, report))
        if not report.done:
            raise ConflictApiError(
                f"the preset's policy {policy.name!r} of kind {policy.kind!r} was not applied; {report.why_not}",
                code="policy_refused",
            )


async def _kinds(swap: PolicySwap, instance: Instance) -> frozenset[str]:
    """Which kinds of policies an instance has: none where it has no such route."""
    try:
        return frozenset((await swap.look(instance)).policies)
    except InstanceControlError as error:
        if error.status == 404:  # noqa: PLR2004 - HTTP's Not Found
            return frozenset()
        raise ConflictApiError(f"{instance.id}: {error}", code="policy_refused") from None


async def _roll_back(swap: PolicySwap, done: list[_Swapped]) -> bool:
    """Roll back all changes; return whether every instance went back."""
    complete = True
    for _, instances, report in reversed(done):
        back = await swap.roll_back(instances, report) if report.done else report
        complete = complete and not back.unfinished
    return complete


def _view(preset: Preset) -> PresetView:
    return PresetView(
        name=preset.name,
        hardware=preset.hardware,
        hot=dict(hot_values(preset)),
        at_start=dict(start_values(preset)),
        notes=list(preset.notes),
        not_measured=list(preset.not_measured),
    )


def _none() -> NotFoundError:
    return NotFoundError("no preset is stored as current", code="preset_not_found")
