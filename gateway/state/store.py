"""The durable store: one Protocol for SQLite and PostgreSQL.

StoreError
├── ConflictError            a document does not have the expected version; nothing was changed
├── RepeatedKeyError         this idempotency key was remembered a moment ago; nothing was changed
├── OperationBusyError       an operation that excludes this one has not ended; nothing was changed
├── OperationLostError       the lease expired, and another gateway undoes this operation; nothing was changed
└── StoreUnavailableError    the database can't be reached or is stuck; nothing was changed, and nothing will be
    ├── OutcomeUnknownError  the database was lost in the middle of a commit: the change may have been made
    └── MalformedStoreError  rows that every store has are missing or malformed; nothing was changed
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from gateway.state.documents import (
    Action,
    AuditEntry,
    Change,
    Document,
    Kind,
    Pending,
    Reading,
    Remembered,
    Revision,
)
from kvcontrol.core.policy_control import Fence

Remember = Callable[[Sequence[Document | None]], Remembered]
"""Makes the remembered answer from the documents after a change."""


class StoreError(Exception):
    """Base of all."""


class ConflictError(StoreError):
    """A document's version is not the expected one. ``found`` is 0 where there is none."""

    def __init__(self, kind: Kind, name: str, *, expected: int | None, found: int) -> None:
        self.kind = kind
        self.name = name
        self.expected = expected
        self.found = found
        super().__init__(f"{kind} {name!r} has version {found}, not {expected}")


class RepeatedKeyError(StoreError):
    """Another request with the same idempotency key came first."""


class OperationBusyError(StoreError):
    """An operation that excludes the new one has not ended."""


class OperationLostError(StoreError):
    """The operation has ended, or another gateway undoes it."""


class StoreUnavailableError(StoreError):
    """The database can't be used now."""


class OutcomeUnknownError(StoreUnavailableError):
    """Whether the change was made is not known."""


class MalformedStoreError(StoreUnavailableError):
    """A row that every store has is missing or malformed."""


class Store(Protocol):
    """The state that survives any kill. Every method raises ``StoreUnavailableError`` when the database can't be used.

    ``apply`` is one transaction: its changes, its audit entry and its remembered answer are all there afterwards, or
    none is, however the process ends. Reads see what was applied before, by whichever gateway.
    """

    async def documents(self, kind: Kind) -> Sequence[Document]:
        """Return all documents of a kind, by name."""
        ...

    async def read(
        self, kinds: Sequence[Kind], clock: Callable[[], float], *, known: Revision | None = None
    ) -> Reading:
        """Return the revision and, unless it is the ``known`` one, all documents of these kinds at one moment; and the
        lead of ``clock`` over the store's. The database answers once.
        """
        ...

    async def document(self, kind: Kind, name: str) -> Document | None: ...

    async def begin(self, action: Action, *, lease_s: float, excludes: Collection[str] = ()) -> int:
        """Write an audit entry before the change that it records, and return its number.

        It is a pending operation until ``apply`` ends it; its owner renews the lease within ``lease_s``. Raises
        ``OperationBusyError`` while an operation whose action is one of ``excludes`` is pending and not abandoned.
        """
        ...

    async def abandon(self, number: int, action: Action) -> None:
        """Write the outcome of an operation whose rollback is not complete, and let the first gateway that notices take
        it over; raises ``OperationLostError``.
        """
        ...

    async def note(self, number: int, note: str, *, lease_s: float, above: int = 0) -> Fence:
        """Write how to undo an operation, before it is done; raises ``OperationLostError``.

        Return a new fence for its calls. The fence after that one is issued, too: for the calls that undo them.
        ``above`` is the newest fence of this store that instances know: an older copy of a store issued it.
        """
        ...

    async def advance(self, above: int) -> None:
        """Let all new fences be newer than ``above``."""
        ...

    async def hold(self, numbers: Sequence[int], *, lease_s: float) -> None:
        """Keep pending operations for another ``lease_s``."""
        ...

    async def pending(self) -> Pending:
        """Return the pending operations of all gateways, and the newest fence."""
        ...

    async def take(self, number: int, *, lease_s: float) -> Fence | None:
        """Take over an operation whose lease expired. Return a new fence for the calls that undo it, None where another
        gateway took it over.
        """
        ...

    async def apply(
        self,
        changes: Sequence[Change],
        *,
        action: Action,
        remember: Remember | None = None,
        completes: int | None = None,
    ) -> Sequence[Document | None]:
        """Make all changes or none; return the documents in their order, None for deleted ones. The action is a new
        entry of the audit log, or the outcome of the operation that it ``completes``.

        ``remember`` makes the remembered answer from them, on another thread, and must not block.
        Raises ``ConflictError``, ``RepeatedKeyError``, ``OperationLostError``. Without changes only the audit entry is
        written.
        """
        ...

    async def remembered(self, key: str) -> Remembered | None:
        """Return the answer to an idempotency key within the last day."""
        ...

    async def audit(self, *, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        """Return the newest entries, newest first; with ``before``, only those with lower numbers."""
        ...

    async def close(self) -> None:
        """Close the connection; nothing else may be called afterwards."""
        ...
