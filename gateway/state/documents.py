"""Contents of the store: versioned documents, the audit log, and answers by idempotency key.

A document is JSON text under a kind and a name. Its version starts at 1 and grows by one with each change; a document
that is deleted and made again goes on counting, so that an old version never fits again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvcontrol.core.policy_control import Fence

ABSENT: Final = 0
"""As an expected version: the document must not be there."""


class Kind(StrEnum):
    """What a document is about; the value is what the store calls it."""

    TENANT = "tenant"
    KEY = "key"
    QUOTA = "quota"
    PRESET = "preset"
    WORKLOAD = "workload"
    POLICY = "policy"
    INSTANCE = "instance"
    ROUTING = "routing"
    PIN = "pin"


class Revision(NamedTuple):
    """Which state of the documents it is. The number grows with every change; a standby that lost the last ones may
    come to the same number again, but not at the same time.
    """

    number: int = 0
    changed_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document as it is now. Times are seconds since 1970."""

    kind: Kind
    name: str
    body: str
    version: int
    created_at_s: float
    updated_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Documents of several kinds, each kind by name, as they were together at a revision; None if that was known.
    ``skew_s`` is by how much the reader's clock is ahead of the store's; times in the store are of the latter.
    """

    revision: Revision
    documents: Mapping[Kind, Sequence[Document]] | None
    skew_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a document. ``expected`` is the version that it must have (``ABSENT``: none); None is any."""

    kind: Kind
    name: str
    body: str
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Remove a document, which must be there; ``expected`` as for ``Put``."""

    kind: Kind
    name: str
    expected: int | None = None


Change = Put | Delete


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Who did what, for the audit log. ``detail`` is JSON text without secrets."""

    actor: str
    action: str
    target: str
    outcome: str = "done"
    detail: str = "{}"
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """An ``Action`` as it was recorded; numbers grow and have no meaning beyond their order."""

    number: int
    at_s: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOperation:
    """Something outside of the store that was begun and has not ended. ``number`` is that of its audit entry.

    ``note`` is JSON text with what it takes to undo it, "" while nothing was done. Once ``left_s`` is below 0, whoever
    began it is taken for dead. One that somebody else undoes is ``abandoned``.
    """

    number: int
    action: Action
    note: str
    left_s: float
    abandoned: bool


class Pending(NamedTuple):
    """Pending operations, the oldest first. ``fence`` was the newest one just before they were read: an operation with
    an older fence is among them, or had ended.
    """

    fence: Fence
    operations: Sequence[PendingOperation]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditBound:
    """How much of the audit log is kept: the newest ``entries``, and none that is older than ``age_s``."""

    entries: int = 100_000
    age_s: float = 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What was answered to a request that came with an idempotency key. ``request`` is a digest of that request."""

    key: str
    request: str
    status: int
    body: str
    etag: str = ""
