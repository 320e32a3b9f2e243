"""How many tokens a text has at least, without tokenizing it."""

from typing import Final

MOST_CHARS_PER_TOKEN: Final = 32
"""Of texts that are no runs of one character: English has 4 to 5, tables and indented code up to 10."""


def least_tokens(chars: int) -> int:
    """Return about how many tokens a text of so many characters has at least."""
    return chars // MOST_CHARS_PER_TOKEN
