"""Undoes what a gateway had begun that died in the middle.

An act is open in the store from before it is done until it ends, and its gateway says every second that it is still
there. Where it does not for ``LEASE_S``, the first other gateway that notices takes the act over: instances go back to
what they ran before, or to what the store says by now, and the audit log says that it was undone.
"""

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from gateway.fleet.control import InstanceControlError
from gateway.fleet.pins import PinKeeper
from gateway.fleet.policies import Policy, PolicySwap
from gateway.fleet.undo_note import UndoNote, read_note
from gateway.problems import ProblemKind, Problems
from gateway.registry import Registry
from gateway.state import ActLostError, OpenAct, Store
from kvcontrol.core.ids import InstanceId

LEASE_S: Final = 5.0
_AWAITED_S: Final = 600.0
"""For so long an instance is waited for that nobody names: it may register itself again."""
_UNDONE: Final = "undone"
_INTERRUPTED: Final = "interrupted"
"""Outcomes of an act that could be undone, and of one of which nobody knows what it did."""


class _Taken(NamedTuple):
    act: OpenAct
    at_s: float


class Rescue:
    """``round`` is called again and again."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        store: Store,
        *,
        registry: Registry,
        swap: PolicySwap,
        pins: PinKeeper,
        problems: Problems,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._registry = registry
        self._swap = swap
        self._pins = pins
        self._problems = problems
        self._clock = clock
        self._taken: dict[int, _Taken] = {}

    async def round(self, own: Collection[int]) -> None:
        """Take over acts whose gateways are gone, but for our own, and end those that are undone; raises
        ``StoreUnavailableError``.
        """
        for act in await self._store.acts():
            if act.left_s < 0 and act.number not in own and act.number not in self._taken:
                await self._take(act)
        if self._taken:
            await self._store.hold(list(self._taken), lease_s=LEASE_S)
        for taken in list(self._taken.values()):
            await self._end(taken)

    async def _take(self, act: OpenAct) -> None:
        if not await self._store.take(act.number, lease_s=LEASE_S):
            return
        self._taken[act.number] = _Taken(act, self._clock())
        what = f"{act.action.action} {act.action.target}"
        self._problems.report(
            ProblemKind.ACT, _subject(act), f"the gateway that began to {what} is gone; this one undoes what it did"
        )
        note = read_note(act.note)
        for each in note.policies:
            policy = Policy(kind=each.kind, name=each.name, params=each.params)
            self._swap.owe(InstanceId(each.instance), policy)
        await self._unpin(note)

    async def _unpin(self, note: UndoNote) -> None:
        async with self._pins.lock:
            for each in note.pins:
                if not self._registry.knows(InstanceId(each.instance)):
                    continue
                instance = self._registry.get(InstanceId(each.instance))
                if each.name not in self._pins.wishes(instance):
                    with suppress(InstanceControlError):  # it ends there by itself, as the lease of every pin does
                        await self._pins.unpin(instance, each.name)

    async def _end(self, taken: _Taken) -> None:
        """Write the end of an act once no instance owes anything for it, but for those that did not come for long."""
        act = taken.act
        note = read_note(act.note)
        awaited = self._clock() - taken.at_s < _AWAITED_S
        for each in note.policies:
            instance = InstanceId(each.instance)
            if each.kind in self._swap.owed(instance) and (awaited or self._registry.knows(instance)):
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
