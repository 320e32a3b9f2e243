"""The bodies of ``/kv/v1/prefixes``: which prefixes an instance keeps whatever comes, and which it is to forget.

A prefix is named by the hashes of its blocks, in prompt order and as lower-case hex on the wire; a pin is called by the
last of them. Requests are parsed strictly: an unknown field is an error that names it.
"""

from typing import Annotated

import msgspec

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tier_control import MOST_BLOCKS

PREFIXES_PATH = "/kv/v1/prefixes"
PIN_PATH = f"{PREFIXES_PATH}/pin"
UNPIN_PATH = f"{PREFIXES_PATH}/unpin"
INVALIDATE_PATH = f"{PREFIXES_PATH}/invalidate"

MOST_PINS = 1000
"""Pins that one instance keeps."""
LONGEST_TTL_S = 366 * 86_400.0

Hashes = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_BLOCKS)]


class PinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv/v1/prefixes/pin``: keep these blocks, those that are here and those that will be computed.

    What comes before the first is pinned too, as far as it is here. ``ttl_s`` null is until it is unpinned. A prefix
    that is pinned already gets the new ``ttl_s``.
    """

    hashes: Hashes
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_TTL_S)] | None = None


class UnpinRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv/v1/prefixes/unpin``: end the pin that is called by this hash; nothing happens where there is none."""

    hash: str


class InvalidateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv/v1/prefixes/invalidate``: forget these blocks and all that follow them, in every tier."""

    hashes: Hashes


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """One pin. ``tiers`` says how many of its ``blocks`` each tier holds now, ``missing`` how many are in none: they
    are pinned when they have been computed. ``left_s`` null is until it is unpinned.
    """

    hash: str
    blocks: int
    tokens: int
    tiers: dict[CacheTier, int]
    missing: int
    left_s: float | None


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/prefixes``: all pins, and how many different blocks they have of those that may be pinned.

    ``limited_by`` says where ``limit_blocks`` comes from. ``errors`` other than 0 is a defect.
    """

    pins: list[Pin]
    pinned_blocks: int
    limit_blocks: int
    limited_by: str
    errors: int


class Unpinned(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an ``UnpinRequest``: whether there was such a pin."""

    unpinned: bool


class Invalidation(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an ``InvalidateRequest``: how many blocks each tier forgot.

    ``in_use_blocks`` stay in HBM until the requests that use them have ended, and go then. ``unpinned`` are pins that
    had such blocks and are no more.
    """

    dropped: dict[CacheTier, int]
    in_use_blocks: int
    unpinned: list[str]
