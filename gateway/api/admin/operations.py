"""Operations of operators outside of the store: pending in the store from before they start until they have ended.

Each gateway renews the lease of its operations every second, or more often; another gateway undoes those whose lease
has expired (``fleet/rescue.py``). One change of policies is pending at a time over all gateways of the store. An
outcome that the store could not take at once is written later.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from gateway.fleet.keeper import PolicyChanges
from gateway.fleet.policies import Choice, Note, Policy
from gateway.fleet.undo_note import NotedPolicy, UndoNote, noted, read_note
from gateway.state import (
    Action,
    Kind,
    OperationLostError,
    PendingOperation,
    Remember,
    Remembered,
    RepeatedKeyError,
    Store,
    StoreUnavailableError,
)
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.policy_control import Fence

_EVERY_S: Final = 1.0
_CHANGES_POLICIES: Final = frozenset({"swap", "apply"})

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Operation:
    """An operation in progress: the number of its audit entry, and whether the store knows its outcome.

    ``noted`` is whether instances may have changed; ``unfinished``, whether some may not have gone back.
    """

    number: int
    ended: bool = field(default=False, kw_only=True)
    noted: bool = field(default=False, kw_only=True)
    unfinished: bool = field(default=False, kw_only=True)
    policies: list[NotedPolicy] = field(default_factory=list, kw_only=True)
    """What its note contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    number: int
    action: Action
    remember: Remembered | None
    unfinished: bool


class Operations:
    """The operations of this process. If it dies, other gateways end those that are left."""

    def __init__(self, store: Store, *, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._open: set[int] = set()
        self._ends: list[_End] = []

    async def begin(self, action: Action) -> Operation:
        """Begin an operation; raises ``StoreUnavailableError``, and ``OperationBusyError`` for a change of policies
        while another gateway makes one.
        """
        excludes = _CHANGES_POLICIES if action.action in _CHANGES_POLICIES else ()
        operation = Operation(await self._store.begin(action, lease_s=self._lease_s, excludes=excludes))
        self._open.add(operation.number)
        return operation

    async def note(self, operation: Operation, note: UndoNote, *, above: int = 0) -> Fence:
        """Write how to undo an operation, before its change is made, and return the fence of its calls.

        Raises ``StoreUnavailableError``, ``OperationLostError``. Where it returns, the lease has not expired: a
        process that was stopped meanwhile may be undone by another gateway, and must change nothing more.
        """
        began_s = monotonic()
        fence = await self._store.note(operation.number, note.text(), lease_s=self._lease_s, above=above)
        if monotonic() - began_s >= self._lease_s:
            raise OperationLostError(
                f"operation {operation.number} may be undone by another gateway: this one stood still for "
                f"{self._lease_s:g} s"
            )
        operation.noted = True
        return fence

    async def note_policies(
        self, operation: Operation, ran: Mapping[InstanceId, Policy], choices: Collection[Choice]
    ) -> Note:
        """Add the policies that instances run to the note of an operation, and return those for a rollback.

        Raises like ``note``.
        """
        pending = await self._store.pending()
        before = await self.ran_before(ran, pending.operations)
        operation.policies += noted(before)
        known = (each.newest(policy.kind, pending.fence.store) for each in choices for policy in ran.values())
        fence = await self.note(operation, UndoNote(policies=operation.policies), above=max(known, default=0))
        return Note(before=before, fence=fence, back=Fence(fence.store, fence.number + 1))

    async def close(self, number: int, action: Action, *, unfinished: bool, remember: Remember | None = None) -> None:
        """Write the outcome of an operation; an unfinished one is left to the first gateway that notices it."""
        if unfinished:
            await self._store.abandon(number, action)
        else:
            await self._store.apply([], action=action, remember=remember, completes=number)

    async def ran_before(
        self, ran: Mapping[InstanceId, Policy], pending: Sequence[PendingOperation]
    ) -> dict[InstanceId, Policy]:
        """Return what instances ran before, given what they run: an instance that an abandoned change may have left at
        another policy will return to the one in its note, unless a policy is stored. Raises ``StoreUnavailableError``.
        """
        stored = {each.name for each in await self._store.documents(Kind.POLICY)}
        before: dict[InstanceId, Policy] = {}
        for operation in pending:
            for each in read_note(operation.note).policies if operation.abandoned else ():
                instance = InstanceId(each.instance)
                if instance in ran and ran[instance].kind == each.kind and each.kind not in stored:
                    before.setdefault(instance, Policy(kind=each.kind, name=each.name, params=each.params))
        return {**ran, **before}

    def over(self, operation: Operation) -> None:
        """Note that the store knows the outcome of an operation."""
        operation.ended = True
        self._open.discard(operation.number)

    def keep(self, operation: Operation, action: Action, remember: Remembered | None = None) -> None:
        """Write this outcome, and the answer to its idempotency key, as soon as the store is available."""
        operation.ended = True
        self._ends.append(
            _End(number=operation.number, action=action, remember=remember, unfinished=operation.unfinished)
        )

    def remembered(self, key: str) -> Remembered | None:
        """Return the answer to an idempotency key, if it is not written yet."""
        return next((each.remember for each in self._ends if each.remember and each.remember.key == key), None)

    async def policy_changes(self, newest: Mapping[str, int]) -> PolicyChanges:
        """Return the pending changes of policies; raises ``StoreUnavailableError``.

        ``newest`` are the newest fences that instances knew before, by store. Where they are newer than the store's, it
        is an older copy, restored or promoted: it continues from theirs.
        """
        pending = await self._store.pending()
        if (above := newest.get(pending.fence.store, 0)) > pending.fence.number:
            await self._store.advance(above)
            pending = await self._store.pending()
        found = [each for each in pending.operations if each.action.action in _CHANGES_POLICIES]
        running = any(not each.abandoned for each in found)
        return PolicyChanges(running=running, pending=bool(found), fence=pending.fence)

    async def write(self) -> None:
        """Write the outcomes that are not in the store yet; raises ``StoreUnavailableError``."""
        while self._ends:
            end = self._ends[0]
            try:
                await self.close(end.number, end.action, unfinished=end.unfinished, remember=_remember(end.remember))
            except RepeatedKeyError:  # another gateway has carried out the same request
                await self._store.apply([], action=end.action, completes=end.number)
            except OperationLostError as error:
                _log.warning(
                    "the result of %s %s was not written to the audit log: %s",
                    end.action.action,
                    end.action.target,
                    error,
                )
            self._ends.remove(end)
            self._open.discard(end.number)

    async def run(self, rescue: Callable[[Collection[int]], Awaitable[None]]) -> None:
        """Renew the leases, write outcomes, and let ``rescue`` undo abandoned operations of others, for ever."""
        while True:
            try:
                if self._open:
                    await self._store.hold(list(self._open), lease_s=self._lease_s)
                await self.write()
                await rescue(frozenset(self._open))
            except StoreUnavailableError as error:
                if self._ends:
                    _log.info(
                        "%d results of operators' changes are not in the audit log yet: %s; they are written later",
                        len(self._ends),
                        error,
                    )
            await asyncio.sleep(min(_EVERY_S, self._lease_s / 4))


def _remember(remembered: Remembered | None) -> Remember | None:
    return None if remembered is None else lambda _: remembered
