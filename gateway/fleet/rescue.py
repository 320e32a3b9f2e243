"""Undoes the operations of gateways that died, and those whose rollback did not reach every instance.

An operation is pending in the store until it ends, and its gateway renews its lease every second. When a lease of
``lease_s`` has expired, the first other gateway that notices takes the operation over: instances return to their
previous state, or to the state in the store, and the audit log records the undo. Each instance of the note receives a
policy call with a new fence, even if it runs the right policy: after that it refuses the ended gateway's calls.
A gateway abandons its own operation when an instance did not answer its rollback; whichever gateway takes it over, the
outcome in the audit log stays.
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
from gateway.state import OperationLostError, PendingOperation, Store
from gateway.state.json_object import json_object_in_part
from kvcontrol.core.ids import InstanceId

_AWAITED_S: Final = 600.0
"""Longest wait for an instance that left the registry: it may register itself again."""

_BEGUN: Final = "begun"
_UNDONE: Final = "undone"
"""Outcome of an operation that another gateway undid."""

_INTERRUPTED: Final = "interrupted"
"""Outcome of an operation without anything to undo; whether it was carried out is unknown."""


class _Taken(NamedTuple):
    operation: PendingOperation
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
        lease_s: float,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._registry = registry
        self._swap = swap
        self._pins = pins
        self._problems = problems
        self._clock = clock
        self._taken: dict[int, _Taken] = {}

    async def round(self, own: Collection[int]) -> None:
        """Take over operations of other gateways whose lease expired, and end those that are undone; raises
        ``StoreUnavailableError``.
        """
        for operation in (await self._store.pending()).operations:
            if operation.left_s < 0 and operation.number not in own and operation.number not in self._taken:
                await self._take(operation)
        if self._taken:
            await self._store.hold(list(self._taken), lease_s=self._lease_s)
        for taken in list(self._taken.values()):
            await self._end(taken)

    async def _take(self, operation: PendingOperation) -> None:
        fence = await self._store.take(operation.number, lease_s=self._lease_s)
        if fence is None:
            return
        self._taken[operation.number] = _Taken(operation, self._clock())
        what = f"{operation.action.action} {operation.action.target}"
        self._problems.report(
            ProblemKind.OPERATION,
            _subject(operation),
            f"the gateway that began to {what} has ended; this gateway undoes the change"
            if operation.action.outcome == _BEGUN
            else f"the rollback of {what} did not reach every instance; this gateway continues it",
        )
        note = read_note(operation.note)
        for each in note.policies:
            policy = Policy(kind=each.kind, name=each.name, params=each.params)
            self._swap.must_restore(InstanceId(each.instance), policy, fence)
        await self._unpin(note)

    async def _unpin(self, note: UndoNote) -> None:
        async with self._pins.lock:
            for each in note.pins:
                if not self._registry.knows(InstanceId(each.instance)):
                    continue
                instance = self._registry.get(InstanceId(each.instance))
                if each.name not in self._pins.desired(instance):
                    with suppress(InstanceControlError):  # the lease of the pin ends there by itself
                        await self._pins.unpin(instance, each.name)

    async def _end(self, taken: _Taken) -> None:
        """End an operation once all instances of its note run their earlier policies, except those that stay away."""
        operation = taken.operation
        note = read_note(operation.note)
        awaited = self._clock() - taken.at_s < _AWAITED_S
        for each in note.policies:
            instance = InstanceId(each.instance)
            if each.kind in self._swap.to_restore(instance) and (awaited or self._registry.knows(instance)):
                return
        action = operation.action
        if action.outcome == _BEGUN:
            action = replace(
                action,
                outcome=_UNDONE if note.policies or note.pins else _INTERRUPTED,
                detail=json.dumps(
                    {**json_object_in_part(action.detail), "interrupted": "the gateway that began it has ended"}
                ),
            )
        with suppress(OperationLostError):  # another gateway has ended it
            await self._store.apply([], action=action, completes=operation.number)
        self._problems.clear(ProblemKind.OPERATION, _subject(operation))
        del self._taken[operation.number]


def _subject(operation: PendingOperation) -> str:
    return f"operation {operation.number}"
