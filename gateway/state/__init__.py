"""Durable state of the gateway."""

from gateway.state.admin_key import load_admin_key
from gateway.state.api_key import KeyDigest, NewKey, make_key
from gateway.state.documents import (
    ABSENT,
    Action,
    AuditBound,
    AuditEntry,
    Change,
    Delete,
    Document,
    Kind,
    PendingOperation,
    Put,
    Remembered,
)
from gateway.state.salt import load_salt_secret
from gateway.state.sqlite import open_sqlite
from gateway.state.store import (
    ConflictError,
    MalformedStoreError,
    OperationBusyError,
    OperationLostError,
    OutcomeUnknownError,
    Remember,
    RepeatedKeyError,
    Store,
    StoreError,
    StoreUnavailableError,
)

__all__ = [
    "ABSENT",
    "Action",
    "AuditBound",
    "AuditEntry",
    "Change",
    "ConflictError",
    "Delete",
    "Document",
    "KeyDigest",
    "Kind",
    "MalformedStoreError",
    "NewKey",
    "OperationBusyError",
    "OperationLostError",
    "OutcomeUnknownError",
    "PendingOperation",
    "Put",
    "Remember",
    "Remembered",
    "RepeatedKeyError",
    "Store",
    "StoreError",
    "StoreUnavailableError",
    "load_admin_key",
    "load_salt_secret",
    "make_key",
    "open_sqlite",
]
