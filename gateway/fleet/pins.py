"""Keeps prefixes pinned on the instances that the store names.

Each call pins a prefix for ``LEASE_S`` and is repeated well before that time is over. So an obsolete pin ends by itself
on an instance that could not be reached at the unpin, and pins of an operator at the instance's own ``/kv/v1`` stay. An
instance that restarts has forgotten its pins and receives them at once; every few seconds the keeper reads the pins of
each instance and sends lost ones again. A refused pin is tried again after a minute. An instance that does not answer
receives nothing for a minute: changes wait for the end of a round, so a round waits for one answer of each instance at
most.

Instances name prefixes by the hashes of their blocks, which depend on weights, KV precision and block size (its
*layout*): a pin has a chain of hashes for each layout that there was when it was made.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.registry import Instance, Registry
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
"""Hex hashes of blocks in prompt order; the last one is the pin's name on an instance."""

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class NoPrefixesError(InstanceControlError):
    """The instance has no ``/kv/v1/prefixes``."""


class DesiredPin(NamedTuple):
    """A prefix to keep on an instance, and its expiry (seconds since 1970; None: never)."""

    chain: Chain
    expires_at_s: float | None


@dataclass(slots=True)
class _Sent:
    epoch: Epoch
    pins: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """By name: its expiry, and the time of the next call."""
    refused: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By name: the reason, and the time."""
    silent_at_s: float | None = None
    """When it last failed to answer."""
    looked_s: float = 0.0
    """When its pins were read last."""


def layout_of(identity: CacheIdentity, model: str) -> str:
    """Return the layout of block hashes: instances with equal layouts name blocks alike."""
    return root_hash(identity, adapter="" if model == identity.model else model).hex()


class PinKeeper:
    """``clock`` is monotonic, ``now`` in seconds since 1970; ``expired`` receives expired pins.

    A change of the store's pins holds ``lock`` until the instances and the store have changed.
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
        self._sent: dict[InstanceId, _Sent] = {}
        self.lock = asyncio.Lock()

    async def run(self) -> None:
        """Run rounds for ever."""
        while True:
            await self.round()
            await asyncio.sleep(_INTERVAL_S)

    async def round(self) -> None:
        """Send every instance the pins that it lacks."""
        async with self.lock:
            pins, now_s = self._pins(), self._now()
            over = [name for name, pin in pins.items() if pin.expires_at_s is not None and pin.expires_at_s <= now_s]
            if over:
                await self._expired(over)
            every = self._registry.all()
            for removed in self._sent.keys() - {each.id for each in every}:
                del self._sent[removed]
            if pins or any(sent.pins for sent in self._sent.values()):
                present = self._registry.reporting()
                await asyncio.gather(*(self._keep(each, self.desired(each)) for each in present))

    def desired(self, instance: Instance, *, without: str | None = None) -> dict[str, DesiredPin]:
        """Return the desired pins of an instance, by its names for them; ``without`` one pin of the store."""
        desired: dict[str, DesiredPin] = {}
        if instance.stats is None:
            return desired
        now_s = self._now()
        for name, pin in self._pins().items():
            over = pin.expires_at_s is not None and pin.expires_at_s <= now_s
            if name == without or over or instance.id not in pin.instances:
                continue
            chain = pin.chain(layout_of(instance.stats.identity, pin.model))
            if not chain:
                continue
            before = desired.get(chain[-1])
            if before is None or _longer(pin.expires_at_s, before.expires_at_s):
                desired[chain[-1]] = DesiredPin(chain, pin.expires_at_s)
        return desired

    def why_not(self, instance: InstanceId, name: str) -> str:
        """Return why an instance lacks a desired pin, "" if no reason is known."""
        sent = self._sent.get(instance)
        return "" if sent is None or name not in sent.refused else sent.refused[name][0]

    async def pin(self, instance: Instance, target: DesiredPin) -> Pin:
        """Pin a prefix on an instance; raises ``InstanceControlError``."""
        left_s = LEASE_S if target.expires_at_s is None else min(LEASE_S, max(0.001, target.expires_at_s - self._now()))
        request = PinRequest(hashes=list(target.chain), ttl_s=left_s)
        done = await self._ask(instance, "POST", PIN_PATH, request, Pin)
        if (sent := self._sent_to(instance)) is not None:
            sent.pins[target.chain[-1]] = (target.expires_at_s, self._clock() + _RENEW_AFTER_S)
            sent.refused.pop(target.chain[-1], None)
        return done

    async def unpin(self, instance: Instance, name: str) -> bool:
        """Unpin a prefix on an instance, and return whether it was pinned; raises ``InstanceControlError``."""
        done = await self._ask(instance, "POST", UNPIN_PATH, UnpinRequest(hash=name), Unpinned)
        if (sent := self._sent_to(instance)) is not None:
            sent.pins.pop(name, None)
            sent.refused.pop(name, None)
        return done.unpinned

    async def look(self, instance: Instance) -> Pins:
        """Return an instance's pins; raises ``InstanceControlError``."""
        return await self._ask(instance, "GET", PREFIXES_PATH, None, Pins)

    async def invalidate(self, instance: Instance, chain: Chain) -> Invalidation:
        """Delete blocks and their successors from an instance; raises ``InstanceControlError``."""
        request = InvalidateRequest(hashes=list(chain))
        done = await self._ask(instance, "POST", INVALIDATE_PATH, request, Invalidation)
        if (sent := self._sent_to(instance)) is not None:
            for name in done.unpinned:
                sent.pins.pop(name, None)
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

    def _sent_to(self, instance: Instance) -> _Sent | None:
        if instance.stats is None:
            return None
        sent = self._sent.get(instance.id)
        if sent is None or sent.epoch != instance.stats.epoch:
            sent = self._sent[instance.id] = _Sent(epoch=instance.stats.epoch, looked_s=self._clock())
        return sent

    async def _keep(self, instance: Instance, desired: Mapping[str, DesiredPin]) -> None:
        sent = self._sent_to(instance)
        if sent is None or (sent.silent_at_s is not None and self._clock() - sent.silent_at_s < _AGAIN_AFTER_S):
            return
        sent.silent_at_s = None
        for name in sent.refused.keys() - desired.keys() - sent.pins.keys() - {PREFIXES_PATH}:
            del sent.refused[name]
        due = self._clock() - sent.looked_s >= _LOOK_EVERY_S and self._due(sent, PREFIXES_PATH)
        if sent.pins and due:
            sent.looked_s = self._clock()
            if not await self._try(instance, sent, PREFIXES_PATH, self._forget_lost(instance, sent)):
                return
        for name in sent.pins.keys() - desired.keys():
            if self._due(sent, name) and not await self._try(instance, sent, name, self.unpin(instance, name)):
                return
        for name, target in desired.items():
            expires_at_s, renew_at_s = sent.pins.get(name, (None, 0.0))
            known = name in sent.pins and expires_at_s == target.expires_at_s and self._clock() < renew_at_s
            due = not known and self._due(sent, name)
            if due and not await self._try(instance, sent, name, self.pin(instance, target)):
                return

    async def _forget_lost(self, instance: Instance, sent: _Sent) -> None:
        """Forget sent pins that an instance has lost."""
        kept = {each.hash for each in (await self.look(instance)).pins}
        for name in sent.pins.keys() - kept:
            del sent.pins[name]
        sent.refused.pop(PREFIXES_PATH, None)

    async def _try(self, instance: Instance, sent: _Sent, name: str, call: Awaitable[object]) -> bool:
        """Return whether there was an answer."""
        try:
            await call
        except InstanceControlError as error:
            if (before := sent.refused.get(name)) is None or before[0] != str(error):
                _log.warning("instance %s does not keep its pinned prefixes: %s", instance.id, error)
            sent.refused[name] = (str(error), self._clock())
            if error.status is None:
                sent.silent_at_s = self._clock()
                return False
        return True

    def _due(self, sent: _Sent, name: str) -> bool:
        before = sent.refused.get(name)
        return before is None or self._clock() - before[1] >= _AGAIN_AFTER_S


def _longer(first: float | None, second: float | None) -> bool:
    return second is not None and (first is None or first > second)
