"""Content of the store: versioned documents, the audit log, and answers by idempotency key.

A document is JSON text under a kind and a name. Its version starts at 1 and grows by one with each change; a document
that is deleted and created again continues its count, so that an old version never matches again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvcontrol.core.policy_control import Fence

ABSENT: Final = 0
"""As an expected version: there must be no such document."""


NOT_TEXT: Final = "not UTF-8 text: "
"""Where a stored value is not UTF-8 text: begins what is read instead, which is neither JSON nor a valid name."""


class Kind(StrEnum):
    """The kind of a document; the value is its name in the store."""

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
    """Identifies a state of the documents. The number grows with every change; a standby that lost the last changes may
    reach the same number again, but not at the same time.
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
    """Documents of several kinds at one revision, each kind by name; None if the reader knew that revision. ``skew_s``
    is the lead of the reader's clock over the store's; times in the store are of the store's clock.
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
    """An entry of the audit log before it is recorded. ``detail`` is JSON text without secrets."""

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
    """A change outside of the store that has not ended. ``number`` is the number of its audit entry.

    ``note`` is JSON text that describes how to undo the change, "" before anything was done. Below 0 ``left_s`` means
    that its lease has expired. ``abandoned`` is whether its gateway has given it up: another one undoes it.
    """

    number: int
    action: Action
    note: str
    left_s: float
    abandoned: bool


class Pending(NamedTuple):
    """Pending operations, the oldest first. ``fence`` was the newest fence just before they were read: an operation
    with an older fence is among them, or had ended.
    """

    fence: Fence
    operations: Sequence[PendingOperation]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditBound:
    """Bounds of the audit log: the newest ``entries``, and none older than ``age_s``."""

    entries: int = 100_000
    age_s: float = 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The answer to a request with an idempotency key. ``request`` is a digest of that request."""

    key: str
    request: str
    status: int
    body: str
    etag: str = ""
