"""Amounts as people type them."""

import re
from dataclasses import replace

from kvgate.engine.instance import EngineLimits
from kvgate.failure import CommandError

_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*$", re.IGNORECASE)
_PERCENT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$")


def parse_bytes(text: str, *, option: str) -> int:
    """Read ``2GiB``, ``512MiB``, ``1.5G`` or plain bytes; raises ``CommandError`` naming the option."""
    found = _SIZE.match(text)
    amount = int(float(found[1]) * _BYTES[(found[2] or "").upper()]) if found else 0
    if amount <= 0:
        raise CommandError(f"{option} is {text!r}; expected an amount of memory, for example 512MiB or 2GiB")
    return amount


def parse_share(text: str, *, option: str) -> float:
    """Read ``40%`` as 0.4; raises ``CommandError`` naming the option unless it is above 0 and below 100 %."""
    found = _PERCENT.match(text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share < 1:
        raise CommandError(f"{option} is {text!r}; expected a share of the GPU's free memory, for example 40%")
    return share


def with_kv_memory(limits: EngineLimits, text: str | None, *, option: str = "--kv-memory") -> EngineLimits:
    """Return the limits with an amount (``2GiB``) or a share (``40%``) of memory for KV blocks, if any."""
    if text is None:
        return limits
    if "%" in text:
        return replace(limits, kv_share=parse_share(text, option=option))
    return replace(limits, kv_bytes=parse_bytes(text, option=option))
