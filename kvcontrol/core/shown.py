"""How a message shows a value that can't be: bounded, whatever it is."""

import reprlib
from typing import Final

MOST_SHOWN: Final = 80
"""Characters."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MOST_SHOWN - 2


def shown(value: object) -> str:
    """Return a value's ``repr`` of at most ``MOST_SHOWN`` characters: of a longer text or number without its middle, of
    a container its first items.
    """
    try:
        return _REPR.repr(value)[:MOST_SHOWN]
    except ValueError:  # an integer with more digits than Python writes
        return f"a huge {type(value).__name__}"
