"""Parts of a prompt without text: images, documents, and unknown blocks.

What stands before one is read as always. The part itself is named by a digest of its bytes, so that what follows it has
a name, too: the same one whenever all before it is the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

_MOST_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Opaque:
    """One such part, as it came. ``gap`` says of what kind it is, in one word from a small fixed set."""

    value: Any
    gap: str

    def stand_in(self) -> str:
        """Return the text that stands for it: its digest, as often as it takes to be about as many tokens as an image.
        O(its bytes).
        """
        try:
            text = as_json(self.value)
        except RecursionError:  # what could be read need not be shallow enough to be written again
            return f"<{self.gap}>"
        digest = xxh3_128_hexdigest(text)
        return f"<{self.gap} {digest * max(1, min(len(text), _MOST_CHARS) // len(digest))}>"


def spelled_out(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return messages in which text stands for each opaque part."""
    return tuple(
        {**message, "content": "\n".join(_spelled(part) for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    )


def as_json(value: object) -> bytes:
    """Return any value from a request's body as JSON; raises ``RecursionError`` for one that is nested too deeply."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # half a surrogate pair; rare enough to take the long way
        return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def _spelled(part: object) -> str:
    return part.stand_in() if isinstance(part, Opaque) else str(part)
