"""Keeps pinned prefixes pinned: the store says which, on which instances.

An instance is told for ``LEASE_S`` at a time and told anew well before that is over. So what nobody wants any more ends
by itself on an instance that could not be reached when it was unpinned, and what an operator pins at an instance's own
``/kv/v1`` is left alone. An instance that restarts has forgotten its pins and is told at once; every few seconds each
is asked what it keeps, and told again what it lost. What it refuses is tried again after a minute. One that gives no
answer is told nothing more for a minute: changes wait for a round to end, so a round waits for one answer of each
instance at most.

Instances know prefixes by the names of their blocks, which depend on weights, KV precision and block size (its
*layout*): a pin has a chain of names for each layout that there was when it was made.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.registry import Instance, InstanceState, Registry
from gateway.state.fleet_bodies import PinBody
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.hashing import root_hash
from kvcontrol.core.ids import Epoch, InstanceId
from kvcontrol.core.prefix_control import (
    INVALIDATE_PATH,
    PIN_PATH,
    PREFIXES_PATH,
    UNPIN_PATH,
    InvalidateRequest,
    Invalidation,
    Pin,
    PinRequest,
    Pins,
    Unpinned,
    UnpinRequest,
)

LEASE_S: Final = 900.0
_RENEW_AFTER_S: Final = 300.0
_INTERVAL_S: Final = 1.0
_AGAIN_AFTER_S: Final = 60.0
_LOOK_EVERY_S: Final = 5.0

Chain = tuple[str, ...]
"""Hex hashes of blocks in prompt order; the last one is what an instance calls the pin."""

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class NoPrefixesError(InstanceControlError):
    """The instance has no ``/kv/v1/prefixes``."""


class Wish(NamedTuple):
    """What an instance is to keep, and until when (seconds since 1970; None is for good)."""

    chain: Chain
    expires_at_s: float | None


@dataclass(slots=True)
class _Told:
    epoch: Epoch
    pins: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """By name: until when, and when it is told anew."""
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By name: why, and when."""
    silent_at_s: float | None = None
    """When it last gave no answer."""
    looked_s: float = 0.0
    """When it was last asked what it keeps."""


def layout_of(identity: CacheIdentity, model: str) -> str:
    """Return what tells apart the ways in which instances name the blocks of a model."""
    return root_hash(identity, adapter="" if model == identity.model else model).hex()


class PinKeeper:
    """``clock`` is monotonic, ``now`` in seconds since 1970; ``expired`` is told of pins whose time is over.

    Whoever changes the store's pins holds ``lock`` until instances have been told and the store has changed.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        control: InstanceControl,
        pins: Callable[[], Mapping[str, PinBody]],
        expired: Callable[[Sequence[str]], Awaitable[None]],
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._control = control
        self._pins = pins
        self._expired = expired
        self._clock = clock
        self._now = now
        self._told: dict[InstanceId, _Told] = {}
        self.lock = asyncio.Lock()

    async def run(self) -> None:
        """Keep them, for ever."""
        while True:
            await self.round()
            await asyncio.sleep(_INTERVAL_S)

    async def round(self) -> None:
        """Tell every instance what it does not know yet."""
        async with self.lock:
            pins, now_s = self._pins(), self._now()
            over = [name for name, pin in pins.items() if pin.expires_at_s is not None and pin.expires_at_s <= now_s]
            if over:
                await self._expired(over)
            every = self._registry.all()
            for gone in self._told.keys() - {each.id for each in every}:
                del self._told[gone]
            if pins or any(told.pins for told in self._told.values()):
                present = [each for each in every if each.state is InstanceState.HEALTHY and each.stats is not None]
                await asyncio.gather(*(self._keep(each, self.wishes(each)) for each in present))

    def wishes(self, instance: Instance, *, without: str | None = None) -> dict[str, Wish]:
        """Return what an instance is to keep, by what it calls it; ``without`` one pin of the store."""
        wishes: dict[str, Wish] = {}
        if instance.stats is None:
            return wishes
        now_s = self._now()
        for name, pin in self._pins().items():
            over = pin.expires_at_s is not None and pin.expires_at_s <= now_s
            if name == without or over or instance.id not in pin.instances:
                continue
            chain = pin.chain(layout_of(instance.stats.identity, pin.model))
            if not chain:
                continue
            before = wishes.get(chain[-1])
            if before is None or _longer(pin.expires_at_s, before.expires_at_s):
                wishes[chain[-1]] = Wish(chain, pin.expires_at_s)
        return wishes

    def why_not(self, instance: InstanceId, name: str) -> str:
        """Return why an instance doesn't keep what it is to keep, "" where nothing is known against it."""
        told = self._told.get(instance)
        return "" if told is None or name not in told.refused else told.refused[name][0]

    async def pin(self, instance: Instance, wish: Wish) -> Pin:
        """Tell an instance to keep a prefix from now on; raises ``InstanceControlError``."""
        left_s = LEASE_S if wish.expires_at_s is None else min(LEASE_S, max(0.001, wish.expires_at_s - self._now()))
        request = PinRequest(hashes=list(wish.chain), ttl_s=left_s)
        done = await self._ask(instance, "POST", PIN_PATH, request, Pin)
        if (told := self._told_of(instance)) is not None:
            told.pins[wish.chain[-1]] = (wish.expires_at_s, self._clock() + _RENEW_AFTER_S)
            told.refused.pop(wish.chain[-1], None)
        return done

    async def unpin(self, instance: Instance, name: str) -> bool:
        """Tell an instance to keep a prefix no longer, and return whether it did; raises ``InstanceControlError``."""
        done = await self._ask(instance, "POST", UNPIN_PATH, UnpinRequest(hash=name), Unpinned)
        if (told := self._told_of(instance)) is not None:
            told.pins.pop(name, None)
            told.refused.pop(name, None)
        return done.unpinned

    async def look(self, instance: Instance) -> Pins:
        """Return what an instance keeps; raises ``InstanceControlError``."""
        return await self._ask(instance, "GET", PREFIXES_PATH, None, Pins)

    async def invalidate(self, instance: Instance, chain: Chain) -> Invalidation:
        """Make an instance forget blocks and what follows them; raises ``InstanceControlError``."""
        request = InvalidateRequest(hashes=list(chain))
        done = await self._ask(instance, "POST", INVALIDATE_PATH, request, Invalidation)
        if (told := self._told_of(instance)) is not None:
            for name in done.unpinned:
                told.pins.pop(name, None)
        return done

    async def _ask(self, instance: Instance, method: str, path: str, body: Any, kind: type[_Answer]) -> _Answer:
        try:
            return msgspec.json.decode(await self._control.call(instance, method, path, body), type=kind)
        except UNREADABLE as error:
            raise InstanceControlError(f"{path} can't be read: {error}", status=None, sure=False) from None
        except InstanceControlError as error:
            if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}:
                raise NoPrefixesError(f"it has no {PREFIXES_PATH}", status=error.status, sure=True) from None
            raise

    def _told_of(self, instance: Instance) -> _Told | None:
        if instance.stats is None:
            return None
        told = self._told.get(instance.id)
        if told is None or told.epoch != instance.stats.epoch:
            told = self._told[instance.id] = _Told(epoch=instance.stats.epoch, looked_s=self._clock())
        return told

    async def _keep(self, instance: Instance, wishes: Mapping[str, Wish]) -> None:
        told = self._told_of(instance)
        if told is None or (told.silent_at_s is not None and self._clock() - told.silent_at_s < _AGAIN_AFTER_S):
            return
        told.silent_at_s = None
        for name in told.refused.keys() - wishes.keys() - told.pins.keys() - {PREFIXES_PATH}:
            del told.refused[name]
        due = self._clock() - told.looked_s >= _LOOK_EVERY_S and self._due(told, PREFIXES_PATH)
        if told.pins and due:
            told.looked_s = self._clock()
            if not await self._try(instance, told, PREFIXES_PATH, self._forget_lost(instance, told)):
                return
        for name in told.pins.keys() - wishes.keys():
            if self._due(told, name) and not await self._try(instance, told, name, self.unpin(instance, name)):
                return
        for name, wish in wishes.items():
            expires_at_s, renew_at_s = told.pins.get(name, (None, 0.0))
            known = name in told.pins and expires_at_s == wish.expires_at_s and self._clock() < renew_at_s
            due = not known and self._due(told, name)
            if due and not await self._try(instance, told, name, self.pin(instance, wish)):
                return

    async def _forget_lost(self, instance: Instance, told: _Told) -> None:
        """Forget that an instance was told of pins that it doesn't keep any more."""
        kept = {each.hash for each in (await self.look(instance)).pins}
        for name in told.pins.keys() - kept:
            del told.pins[name]
        told.refused.pop(PREFIXES_PATH, None)

    async def _try(self, instance: Instance, told: _Told, name: str, call: Awaitable[object]) -> bool:
        """Return whether there was an answer."""
        try:
            await call
        except InstanceControlError as error:
            if (before := told.refused.get(name)) is None or before[0] != str(error):
                _log.warning("instance %s does not keep its pinned prefixes: %s", instance.id, error)
            told.refused[name] = (str(error), self._clock())
            if error.status is None:
                told.silent_at_s = self._clock()
                return False
        return True

    def _due(self, told: _Told, name: str) -> bool:
        before = told.refused.get(name)
        return before is None or self._clock() - before[1] >= _AGAIN_AFTER_S


def _longer(first: float | None, second: float | None) -> bool:
    return second is not None and (first is None or first > second)


__all__ = ["LEASE_S", "Chain", "NoPrefixesError", "PinKeeper", "Wish", "layout_of"]
