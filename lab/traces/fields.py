"""Values of a trace's lines, each taken only if it can be what it says it is; ``ValueError`` says why it can't.

Numbers have bounds, so that sums of them stay exact: a time of 1e300 s would swallow every difference from others.
"""

from array import array
from collections.abc import Mapping
from typing import Any, Final

from kvcontrol.core.shown import shown

MOST_TOKENS: Final = 1 << 31
MOST_SECONDS: Final = 100 * 365.25 * 86_400
"""A hundred years: times may count from 1970. Differences of a microsecond are still told apart at that."""
_MOST_BLOCK: Final = (1 << 63) - 1


def field(said: Mapping[str, Any], name: str) -> Any:
    """Return a field that must be there."""
    if name not in said:
        raise ValueError(f"{name} is missing")
    return said[name]


def tokens(said: Any) -> int:
    """Return a number of tokens."""
    if type(said) is not int or said < 0:  # no bool: true is 1 to Python
        raise ValueError(f"{shown(said)} is no number of tokens")
    if said > MOST_TOKENS:
        raise ValueError(f"{shown(said)} tokens; at most {MOST_TOKENS:,} are taken")
    return said


def block(said: Any) -> int:
    """Return the id of a block."""
    if type(said) is not int or not 0 <= said <= _MOST_BLOCK:
        raise ValueError(f"{shown(said)} is no block; blocks are numbered from 0, below 2^63")
    return said


def seconds(said: Any, *, per_second: int = 1) -> float:
    """Return a time, of which there are so many units in a second, in seconds."""
    if isinstance(said, bool) or not isinstance(said, int | float) or not said >= 0:  # NaN is not, either
        raise ValueError(f"{shown(said)} is no time")
    if said > MOST_SECONDS * per_second:
        raise ValueError(
            f"{shown(said)} is no time: more than 100 years; the most is {MOST_SECONDS * per_second:,.0f}"
            f" ({'milliseconds' if per_second > 1 else 'seconds'})"
        )
    return said / per_second


def listed(said: Any, what: str) -> list[Any]:
    """Return a list of ``what``."""
    if not isinstance(said, list):
        raise ValueError(f"{shown(said)} is no list of {what}")  # noqa: TRY004 - one kind of error for one kind of file
    return said


def fit(ids: "array[int]", prompt_tokens: int, block_tokens: int) -> None:
    """Refuse blocks that aren't those of such a prompt: all that it fills, and the last, partial one or not."""
    full = prompt_tokens // block_tokens
    most = -(-prompt_tokens // block_tokens)
    if not full <= len(ids) <= most:
        allowed = f"{full:,}" if full == most else f"{full:,} (or {most:,} with the partial one)"
        raise ValueError(
            f"{len(ids):,} blocks for a prompt of {prompt_tokens:,} tokens; at {block_tokens} tokens a block it has "
            f"{allowed}"
        )
    if len(set(ids)) < len(ids):
        raise ValueError("a block is twice in one prompt; an id stands for a block with all before it")
