"""Errors of the control plane.

KvControlError
├── IdentityError     a cache identity that can't be hashed
└── WireError         bytes from a peer that are not what the protocol allows
"""


class KvControlError(Exception):
    """Base of every error that ``kvcontrol`` raises on purpose."""


class IdentityError(KvControlError, ValueError):
    """A field of a cache identity is missing or out of range; the message names it and what is allowed."""


class WireError(KvControlError, ValueError):
    """A message from a peer can't be decoded; the message says which part and why."""


__all__ = ["IdentityError", "KvControlError", "WireError"]
