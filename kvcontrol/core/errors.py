"""Errors of the control plane.

KvControlError
├── IdentityError     a cache identity that can't be hashed
└── WireError         bytes from a peer that are not what the protocol allows

``UNREADABLE`` is what msgspec raises for bytes that it can't read: beside its own error that of Python for text that is
no UTF-8, and that for what is nested too deeply.
"""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class KvControlError(Exception):
    """Base of every error that ``kvcontrol`` raises on purpose."""


class IdentityError(KvControlError, ValueError):
    """A field of a cache identity is missing or out of range; the message names it and what is allowed."""


class WireError(KvControlError, ValueError):
    """A message from a peer can't be decoded; the message says which part and why."""
