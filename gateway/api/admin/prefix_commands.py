"""Pins, unpins and invalidates prefixes over the fleet: instances, stored pin, and answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import Field

from gateway.api.admin.prefix_names import NamedPrefix, PrefixBody, PrefixNames
from gateway.api.admin.prefix_views import (
    BAD,
    InvalidatedView,
    Outcome,
    PinList,
    PinView,
    PlaceView,
    failure,
    invalidated_view,
    kept_view,
    pin_view,
    pinned_view,
)
from gateway.errors import ConflictApiError
from gateway.fleet.control import InstanceControlError
from gateway.fleet.pins import LEASE_S, DesiredPin, PinKeeper, layout_of
from gateway.fleet.undo_note import NotedPin
from gateway.registry import Instance, Registry
from gateway.state import Change, Delete, Document, Kind, Put
from gateway.state.bodies import Text
from gateway.state.fleet_bodies import PinBody
from gateway.state.stored import field, read, readable, written
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.prefix_control import LONGEST_TTL_S, Pins

_UNPIN_BY_ITSELF: Final = f"its lease there expires within {LEASE_S:g} s"

_Done = TypeVar("_Done")


class PinPrefixBody(PrefixBody):
    """Which prefix to keep, where, and how long."""

    ttl_s: float | None = Field(None, gt=0, le=LONGEST_TTL_S, description="Seconds; null is until it is unpinned.")
    note: Text = Field("", description="For people.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinning:
    """A prefix that was pinned on instances: the outcomes, and the pin to store."""

    prefix: NamedPrefix
    places: Mapping[str, PlaceView]
    stored: PinBody
    fresh: Sequence[Instance]
    """Those that did not keep it before."""


class PrefixCommands:
    """Calls the instances; the caller writes the store and holds ``lock`` for a change of both."""

    def __init__(self, *, names: PrefixNames, registry: Registry, keeper: PinKeeper, now: Callable[[], float]) -> None:
        self._names = names
        self._registry = registry
        self._keeper = keeper
        self._now = now
        self.lock = keeper.lock

    async def shown(self, documents: Sequence[Document]) -> PinList:
        """Return the stored pins, and where their blocks are."""
        present = self._registry.reporting()
        looks = await _each(present, [self._keeper.look(each) for each in present])
        return PinList(
            data=readable(
                lambda each: self.view(each, self._places(each, looks)),
                [each for each in documents if not _over(each, self._now())],
            ),
            instances={name: kept_view(look) for name, look in looks.items()},
        )

    def view(self, document: Document, places: Mapping[str, PlaceView]) -> PinView:
        """Return a stored pin as it is shown."""
        return pin_view(document, places, now_s=self._now())

    async def pin(
        self,
        body: PinPrefixBody,
        prefix: NamedPrefix,
        before: PinBody | None,
        *,
        noted: Callable[[list[NotedPin]], Awaitable[None]],
    ) -> Pinning:
        """Pin a prefix on instances, with ``before`` in the store; raises ``ApiError`` if no instance pins it.

        Before any instance is told, ``noted`` gets those that do not keep it yet.
        """
        meant = self._names.candidates(body, prefix)
        named = body.instances is not None
        targets = meant.able if named else self._names.holders(prefix, meant.able)
        expires_at_s = None if body.ttl_s is None else self._now() + body.ttl_s
        fresh = [each for each in targets if prefix.chain(each)[-1] not in self._keeper.desired(each)]
        await noted([NotedPin(instance=each.id, name=prefix.chain(each)[-1]) for each in fresh])
        done = await _each(
            targets, [self._keeper.pin(each, DesiredPin(prefix.chain(each), expires_at_s)) for each in targets]
        )
        places = {name: pinned_view(each) for name, each in done.items()}
        if named:
            places |= {name: PlaceView(outcome=Outcome.SKIPPED, reason=why) for name, why in meant.skipped.items()}
        if all(each.outcome is not Outcome.PINNED for each in places.values()):
            reasons = "; ".join(f"{name}: {each.reason}" for name, each in places.items())
            raise ConflictApiError(f"no instance pinned the prefix ({reasons})", code="pin_refused")
        kept = [str(each.id) for each in targets if places[str(each.id)].outcome in {Outcome.PINNED, Outcome.FAILED}]
        stored = PinBody(
            model=body.model,
            tenant=body.tenant,
            note=body.note,
            tokens=prefix.tokens,
            chains=({} if before is None else before.chains) | self._names.layouts(prefix, targets),
            instances=tuple(dict.fromkeys([*(() if before is None else before.instances), *kept])),
            expires_at_s=expires_at_s,
        )
        return Pinning(prefix=prefix, places=places, stored=stored, fresh=fresh)

    async def take_back(self, pinning: Pinning) -> None:
        """Undo a pinning that could not be stored."""
        chains = [(each, pinning.prefix.chain(each)[-1]) for each in pinning.fresh]
        await _each(pinning.fresh, [self._keeper.unpin(each, name) for each, name in chains])

    async def unpin(self, pin_id: str, pin: PinBody) -> dict[str, PlaceView]:
        """Unpin a stored pin on its instances."""
        known = {each.id: each for each in self._registry.all()}
        done = await asyncio.gather(
            *(self._unpinned(known.get(InstanceId(name)), pin, pin_id) for name in pin.instances)
        )
        return dict(zip(pin.instances, done, strict=True))

    async def invalidate(
        self, body: PrefixBody, prefix: NamedPrefix, documents: Sequence[Document]
    ) -> tuple[dict[str, InvalidatedView], list[Change]]:
        """Make instances forget a prefix, and return what follows for the stored pins; raises ``ApiError``."""
        meant = self._names.candidates(body, prefix)
        done = await _each(meant.able, [self._keeper.invalidate(each, prefix.chain(each)) for each in meant.able])
        views = {name: invalidated_view(each) for name, each in done.items()}
        views |= {name: InvalidatedView(outcome=Outcome.SKIPPED, reason=why) for name, why in meant.skipped.items()}
        invalidated = [each for each in meant.able if views[str(each.id)].outcome is Outcome.INVALIDATED]
        return views, _ended(documents, prefix, invalidated)

    def _places(self, document: Document, looks: Mapping[str, Pins | InstanceControlError]) -> dict[str, PlaceView]:
        pin = read(PinBody, document)
        known = {str(each.id): each for each in self._registry.all()}
        return {name: self._place(pin, known.get(name), looks.get(name)) for name in pin.instances}

    def _place(self, pin: PinBody, instance: Instance | None, look: Pins | InstanceControlError | None) -> PlaceView:
        if isinstance(look, InstanceControlError):
            return pinned_view(look)
        if instance is None or instance.stats is None or look is None:
            why = "the instance is unknown now" if instance is None else f"it is {instance.state}: {instance.reason}"
            return PlaceView(outcome=Outcome.WAITING, reason=why)
        chain = pin.chain(layout_of(instance.stats.identity, pin.model))
        if not chain:
            reason = "it names blocks otherwise than when this was pinned (other weights or settings); pin it again"
            return PlaceView(outcome=Outcome.REFUSED, reason=reason)
        if (found := next((each for each in look.pins if each.hash == chain[-1]), None)) is not None:
            return pinned_view(found)
        if why := self._keeper.why_not(instance.id, chain[-1]):
            return PlaceView(outcome=Outcome.REFUSED, reason=why)
        return PlaceView(outcome=Outcome.WAITING, reason="the pin has not been sent yet")

    async def _unpinned(self, instance: Instance | None, pin: PinBody, pin_id: str) -> PlaceView:
        if instance is None or instance.stats is None:
            return PlaceView(outcome=Outcome.SKIPPED, reason="it isn't there")
        chain = pin.chain(layout_of(instance.stats.identity, pin.model))
        if not chain:
            return PlaceView(outcome=Outcome.SKIPPED, reason="it names blocks otherwise than when this was pinned")
        if chain[-1] in self._keeper.desired(instance, without=pin_id):
            return PlaceView(outcome=Outcome.KEPT, reason="another pin has the same blocks")
        try:
            await self._keeper.unpin(instance, chain[-1])
        except InstanceControlError as error:
            outcome, reason = failure(error)
            return PlaceView(outcome=outcome, reason=f"{reason}; {_UNPIN_BY_ITSELF}" if outcome in BAD else reason)
        return PlaceView(outcome=Outcome.UNPINNED)


async def _each(
    instances: Sequence[Instance], calls: Sequence[Awaitable[_Done]]
) -> Mapping[str, _Done | InstanceControlError]:
    async def one(call: Awaitable[_Done]) -> _Done | InstanceControlError:
        try:
            return await call
        except InstanceControlError as error:
            return error

    done = await asyncio.gather(*map(one, calls))
    return dict(zip((str(each.id) for each in instances), done, strict=True))


def _over(document: Document, now_s: float) -> bool:
    expires_at_s = field(document, "expires_at_s")
    return isinstance(expires_at_s, int | float) and expires_at_s <= now_s


def _ended(documents: Sequence[Document], prefix: NamedPrefix, invalidated: Sequence[Instance]) -> list[Change]:
    """Remove instances that dropped blocks of pins from these pins; a pin without instances ends."""
    ended: list[Change] = []
    for document, pin in readable(lambda each: (each, read(PinBody, each)), documents):
        forgot = {
            str(each.id)
            for each in invalidated
            if each.stats is not None
            and not set(pin.chain(layout_of(each.stats.identity, pin.model))).isdisjoint(prefix.chain(each))
        }
        left = tuple(name for name in pin.instances if name not in forgot)
        if left == pin.instances:
            continue
        if left:
            body = written(pin.model_copy(update={"instances": left}), document)
            ended.append(Put(kind=Kind.PIN, name=document.name, body=body, expected=document.version))
        else:
            ended.append(Delete(kind=Kind.PIN, name=document.name, expected=document.version))
    return ended
