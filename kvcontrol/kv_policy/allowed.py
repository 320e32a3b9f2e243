"""What callers may give: the checks that all share, and the error that names what was given and what is allowed.

Each is made before anything changes, once a call and never once a victim. Numbers are bounded where what is worked out
of them must stay one.
"""

import math
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Final, TypeGuard

from kvcontrol.core.shown import shown

MOST_CAPACITY_BLOCKS: Final = 1 << 48
"""More than any memory has; what is counted in capacities stays a number that is exact."""
MOST_TOKENS: Final = 1 << 48
MOST_BYTES: Final = 1 << 63
MOST_CAPACITIES: Final = 1e6
"""Of what is given in capacities."""


class PolicyError(ValueError):
    """There is no such policy, or it can't be told that; the message names what is allowed."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number; a truth value is none."""
    return not isinstance(value, bool) and isinstance(value, Real)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is of a type of whole numbers."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def check_whole(name: str, value: object, *, least: int = 0, most: int | None = None) -> None:
    """Raise ``PolicyError`` for what is no whole number from ``least`` to ``most``."""
    if is_whole(value) and value >= least and (most is None or value <= most):
        return
    upto = "" if most is None else f" and <= {most}"
    raise PolicyError(f"{name} is {shown(value)}; it must be >= {least}{upto}, a whole number")


def check_number(
    name: str, value: object, *, least: float = 0.0, above: float | None = None, most: float = math.inf
) -> None:
    """Raise ``PolicyError`` for what is no finite number ``above`` what it says or from ``least`` on, to ``most``."""
    if is_number(value):
        is_enough = value >= least if above is None else value > above
        if is_enough and value <= min(most, sys.float_info.max):
            return
    bound = f">= {least:g}" if above is None else f"> {above:g}"
    upto = "" if most == math.inf else f", at most {most:g}"
    raise PolicyError(f"{name} is {shown(value)}; it must be {bound} and finite{upto}")


def check_share(name: str, value: object) -> None:
    """Raise ``PolicyError`` for what is no number from 0 to 1."""
    if not (is_number(value) and 0 <= value <= 1):
        raise PolicyError(f"{name} is {shown(value)}; allowed is 0 to 1")


def check_keys(keys: Sequence[object]) -> None:
    """Raise ``PolicyError`` for keys that can't be remembered; about 10 ns a key that keeps its hash."""
    try:
        hash(tuple(keys))
    except TypeError:
        place = next((place for place, key in enumerate(keys) if not _is_hashable(key)), None)
        if place is None:
            raise
        raise PolicyError(f"keys[{place}] is {shown(keys[place])}; allowed are hashable values") from None


def check_prompt(prompt: Sequence[object], block_tokens: object, prompt_tokens: object) -> None:
    """Raise ``PolicyError`` for a prompt that can't be."""
    check_whole("block_tokens", block_tokens, least=1, most=MOST_TOKENS)
    check_whole("prompt_tokens", prompt_tokens, most=MOST_TOKENS)
    check_keys(prompt)


def check_capacity(capacity_blocks: int) -> None:
    """Raise ``PolicyError`` for a number of blocks that no tier can have."""
    if not is_whole(capacity_blocks) or capacity_blocks < 1:
        raise PolicyError(f"a capacity of {shown(capacity_blocks)} blocks; allowed is 1 or more, a whole number")
    if capacity_blocks > MOST_CAPACITY_BLOCKS:
        raise PolicyError(f"a capacity of more than {MOST_CAPACITY_BLOCKS:,} blocks; allowed is that at most")


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
