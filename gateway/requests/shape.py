"""Bounds the complexity of a body before it is parsed.

Objects of a parser take up to fifty times the bytes that spell them, and the time of an object is that of a hundred
bytes of text. So a long body may be long text, images or token ids, and not millions of objects: with these bounds what
is made of it stays within some 100 MB beside its texts, and no step of its reading takes longer than about 50 ms.
"""

import re
from collections.abc import Iterator
from typing import Final

from gateway.errors import InvalidRequestError

MOST_FIELDS: Final = 100_000
"""Objects and fields."""
MOST_ITEMS: Final = 1_000_000
"""Lists and what follows another item: token ids, mostly."""
MOST_ESCAPES: Final = 4_000_000
_NEVER_TOO_MANY_BYTES: Final = 2 * MOST_FIELDS
"""An object, or a field, takes two bytes at least, and a comma."""
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(")?|[{:\[,]', re.DOTALL)
"""A text, or as much of it as there is, or what begins an object, a field, a list or an item."""
_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)
"""The rest of a text."""
_COUNTED: Final = b"\\{:[,"
_LOOKED_AT_ONCE: Final = 1 << 18
"""Some milliseconds of work, within which no other thread runs."""
_FIELDS: Final = b"{:"
_QUOTE: Final = ord('"')


def check_shape(body: bytes) -> None:
    """Raise ``InvalidRequestError`` for a body with too many fields, items or escapes. O(len(body)).

    Bytes are counted first; only where those that make fields and items are many, it is looked which stand in texts.
    """
    if len(body) <= _NEVER_TOO_MANY_BYTES:
        return
    parts = (body[start : start + _LOOKED_AT_ONCE] for start in range(0, len(body), _LOOKED_AT_ONCE))
    if sum(len(part) - len(part.translate(None, _COUNTED)) for part in parts) <= MOST_FIELDS:  # mostly
        return
    if body.count(b"\\") > MOST_ESCAPES:
        raise _refused("escapes in its texts", MOST_ESCAPES)
    fields = body.count(b"{") + body.count(b":")
    if fields <= MOST_FIELDS and body.count(b"[") + body.count(b",") <= MOST_ITEMS:
        return
    fields = items = 0
    for mark in structure(body):
        if mark in _FIELDS:
            fields += 1
            if fields > MOST_FIELDS:
                raise _refused("objects and fields", MOST_FIELDS)
        else:
            items += 1
            if items > MOST_ITEMS:
                raise _refused("items in its lists", MOST_ITEMS)


def structure(body: bytes, at_once: int = _LOOKED_AT_ONCE) -> Iterator[int]:
    """Give the marks outside of texts, in order.

    No step looks at more than ``at_once`` bytes, 2 at least: other threads run in between.
    """
    place, in_text = 0, False
    while place < len(body):
        end = place + at_once
        if in_text:
            found = _TEXT.match(body, place, end)
            if found is None or found.end() == place:  # a backslash is all that is left
                return
            place, in_text = found.end(), found[1] is None
            continue
        for found in _STRUCTURE.finditer(body, place, end):
            first = body[found.start()]
            if first != _QUOTE:
                yield first
            elif found[1] is None:
                place, in_text = found.end(), True
                break
        else:
            place = end


def _refused(what: str, most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the request body has more than {most} {what}, the most allowed: send less in one request",
        code="body_too_complex",
    )
