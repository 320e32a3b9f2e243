"""The views of ``/admin/v1/prefixes``, from the reports of instances."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, Literal

from pydantic import BaseModel, Field

from gateway.fleet.control import InstanceControlError
from gateway.fleet.pins import NoPrefixesError
from gateway.state import Document
from gateway.state.fleet_bodies import PinBody
from gateway.state.stored import read
from kvcontrol.core.prefix_control import Invalidation, Pin, Pins


class Outcome(StrEnum):
    """What became of it on one instance."""

    PINNED = "pinned"
    WAITING = "waiting"
    UNPINNED = "unpinned"
    KEPT = "kept"
    INVALIDATED = "invalidated"
    REFUSED = "refused"
    FAILED = "failed"
    SKIPPED = "skipped"


BAD: Final = frozenset({Outcome.REFUSED, Outcome.FAILED})


class PlaceView(BaseModel):
    """A pin on one instance: pinned, waiting (to be sent), refused, failed (unknown), skipped, unpinned, or kept (by
    another pin).
    """

    outcome: Outcome
    reason: str = ""
    tiers: dict[str, int] = Field(default_factory=dict, description="Blocks of it that each tier holds.")
    missing_blocks: int | None = Field(None, description="Blocks that are kept once they have been computed.")


class PinView(BaseModel):
    """A pinned prefix."""

    id: str
    model: str
    tenant: str
    note: str
    tokens: int = Field(description="Those of a last block that is not full, which is not kept, included.")
    expires_at_s: float | None = Field(description="Seconds since 1970; null is when it is unpinned.")
    left_s: float | None
    created_at_s: float = Field(description="Seconds since 1970.")
    version: int
    instances: dict[str, PlaceView]
    failed: int = Field(description="Instances that refused or could not be reached.")


class KeptView(BaseModel):
    """What one instance keeps of all pins, or why that is unknown."""

    pinned_blocks: int | None = None
    limit_blocks: int | None = None
    limited_by: str | None = None
    problem: str | None = None


class PinList(BaseModel):
    """All pins, and what instances have room for."""

    object: Literal["list"] = "list"
    data: list[PinView]
    instances: dict[str, KeptView]


class UnpinView(BaseModel):
    """What became of it on each instance."""

    id: str
    instances: dict[str, PlaceView]
    failed: int


class InvalidatedView(BaseModel):
    """What one instance forgot: invalidated, refused, failed or skipped."""

    outcome: Outcome
    reason: str = ""
    dropped: dict[str, int] = Field(default_factory=dict, description="Blocks by tier.")
    in_use_blocks: int = Field(0, description="Blocks that go when the requests that use them have ended.")


class InvalidateView(BaseModel):
    """By instance; ``unpinned`` are pins that ended with it, there."""

    instances: dict[str, InvalidatedView]
    unpinned: list[str]
    failed: int


def pin_view(document: Document, places: Mapping[str, PlaceView], *, now_s: float) -> PinView:
    """Return a stored pin as it is shown at ``now_s`` of the store's clock."""
    pin = read(PinBody, document)
    return PinView(
        id=document.name,
        model=pin.model,
        tenant=pin.tenant,
        note=pin.note,
        tokens=pin.tokens,
        expires_at_s=pin.expires_at_s,
        left_s=None if pin.expires_at_s is None else max(0.0, pin.expires_at_s - now_s),
        created_at_s=document.created_at_s,
        version=document.version,
        instances=dict(places),
        failed=failures(places.values()),
    )


def kept_view(look: Pins | InstanceControlError) -> KeptView:
    """Return an instance's report of all pins."""
    if isinstance(look, InstanceControlError):
        return KeptView(problem=str(look))
    return KeptView(pinned_blocks=look.pinned_blocks, limit_blocks=look.limit_blocks, limited_by=look.limited_by)


def failure(error: InstanceControlError) -> tuple[Outcome, str]:
    """Return the outcome of a failed call to an instance, with its reason."""
    if isinstance(error, NoPrefixesError):
        return Outcome.SKIPPED, str(error)
    return (Outcome.REFUSED if error.sure and error.status is not None else Outcome.FAILED), str(error)


def pinned_view(done: Pin | InstanceControlError) -> PlaceView:
    """Return the view of an instance's pin."""
    if isinstance(done, InstanceControlError):
        outcome, reason = failure(done)
        return PlaceView(outcome=outcome, reason=reason)
    tiers = {tier.value: blocks for tier, blocks in done.tiers.items()}
    return PlaceView(outcome=Outcome.PINNED, tiers=tiers, missing_blocks=done.missing)


def invalidated_view(done: Invalidation | InstanceControlError) -> InvalidatedView:
    """Return the view of an instance's dropped blocks."""
    if isinstance(done, InstanceControlError):
        outcome, reason = failure(done)
        return InvalidatedView(outcome=outcome, reason=reason)
    dropped = {tier.value: blocks for tier, blocks in done.dropped.items()}
    return InvalidatedView(outcome=Outcome.INVALIDATED, dropped=dropped, in_use_blocks=done.in_use_blocks)


def failures(views: Iterable[PlaceView | InvalidatedView]) -> int:
    """Count the instances that refused or could not be reached."""
    return sum(each.outcome in BAD for each in views)
