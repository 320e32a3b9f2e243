"""Undoes what a gateway had begun that died in the middle.

An act is open in the store from before it is done until it ends, and its gateway says every second that it is still
there. Where it does not for ``LEASE_S``, the first other gateway that notices takes the act over: instances go back to
what they ran before, or to what the store says by now, and the audit log says that it was undone.
"""

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final

from gateway.fleet.act_note import ActNote, read_note
from gateway.fleet.control import InstanceControlError
from gateway.fleet.pins import PinKeeper
from gateway.fleet.policies import Policy, PolicySwap
from gateway.problems import ProblemKind, Problems
from gateway.registry import Registry
from gateway.state import ActLostError, OpenAct, Store
from kvcontrol.core.ids import InstanceId

LEASE_S: Final = 5.0
_UNDONE: Final = "undone"
_INTERRUPTED: Final = "interrupted"
"""Outcomes of an act that could be undone, and of one of which nobody knows what it did."""


class Rescue:
    """``round`` is called again and again."""

    def __init__(
        self, store: Store, *, registry: Registry, swap: PolicySwap, pins: PinKeeper, problems: Problems
    ) -> None:
        self._store = store
        self._registry = registry
        self._swap = swap
        self._pins = pins
        self._problems = problems
        self._taken: dict[int, OpenAct] = {}

    async def round(self, own: Collection[int]) -> None:
        """Take over acts whose gateways are gone, but for our own, and end those that are undone; raises
        ``StoreUnavailableError``.
        """
        for act in await self._store.acts():
            if act.left_s < 0 and act.number not in own and act.number not in self._taken:
                await self._take(act)
        if self._taken:
            await self._store.hold(list(self._taken), lease_s=LEASE_S)
        for act in list(self._taken.values()):
            await self._end(act)

    async def _take(self, act: OpenAct) -> None:
        if not await self._store.take(act.number, lease_s=LEASE_S):
            return
        self._taken[act.number] = act
        what = f"{act.action.action} {act.action.target}"
        self._problems.report(
            ProblemKind.ACT, _subject(act), f"the gateway that began to {what} is gone; this one undoes what it did"
        )
        note = read_note(act.note)
        for each in note.policies:
            if self._registry.knows(InstanceId(each.instance)):
                policy = Policy(kind=each.kind, name=each.name, params=each.params)
                self._swap.owe(InstanceId(each.instance), policy)
        await self._unpin(note)

    async def _unpin(self, note: ActNote) -> None:
        async with self._pins.lock:
            for each in note.pins:
                if not self._registry.knows(InstanceId(each.instance)):
                    continue
                instance = self._registry.get(InstanceId(each.instance))
                if each.name not in self._pins.wishes(instance):
                    with suppress(InstanceControlError):  # it ends there by itself, as the lease of every pin does
                        await self._pins.unpin(instance, each.name)

    async def _end(self, act: OpenAct) -> None:
        """Write the end of an act once no instance owes anything for it."""
        note = read_note(act.note)
        for each in note.policies:
            if each.kind in self._swap.owed(InstanceId(each.instance)):
                return
        outcome = _UNDONE if note.policies or note.pins else _INTERRUPTED
        detail = json.dumps({**json.loads(act.action.detail), "interrupted": "the gateway that began it is gone"})
        with suppress(ActLostError):  # then it has ended otherwise, and nothing is left to be done
            await self._store.apply([], action=replace(act.action, outcome=outcome, detail=detail), begun=act.number)
        self._problems.clear(ProblemKind.ACT, _subject(act))
        del self._taken[act.number]


def _subject(act: OpenAct) -> str:
    return f"act {act.number}"


__all__ = ["LEASE_S", "Rescue"]
