"""How evenly something is shared: Jain, Chiu and Hawe's index (1984)."""

from collections.abc import Iterable

from kvcontrol.kv_policy.allowed import check_number


def jain_index(shares: Iterable[float]) -> float:
    """Return 1 where all shares are equal, 1/n where one of n has all; 1 for none at all. ``ValueError`` below 0 and
    for what isn't finite.
    """
    total = squares = 0.0
    number = 0
    for share in shares:
        check_number("a share", share)
        total += share
        squares += share * share
        number += 1
    return total * total / (number * squares) if squares else 1.0
