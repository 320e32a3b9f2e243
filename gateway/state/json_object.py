"""Reads text of the store that should be a JSON object, whatever the text is."""

import json
from typing import Any, Final

_MOST_LEVELS: Final = 200
"""Deepest nesting, as pydantic's own reader of JSON has it."""

_MOST_SHOWN: Final = 200
_TOO_DEEP: Final = f"its JSON nests deeper than {_MOST_LEVELS} levels"


def json_object(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; raises ``ValueError`` for any other text."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of the text, whose type is right
    if _is_deeper(found, _MOST_LEVELS):
        raise ValueError(_TOO_DEEP)
    return found


def json_object_in_part(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object. For any other text return its beginning as the field ``unreadable``."""
    try:
        return json_object(text)
    except ValueError:
        return {"unreadable": str(text)[:_MOST_SHOWN]}


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON nests deeper. Linear in its size, and itself without recursion."""
    layer = [value]
    for _ in range(levels):
        inner = (each for outer in layer for each in (outer.values() if isinstance(outer, dict) else outer))
        layer = [each for each in inner if isinstance(each, dict | list)]
        if not layer:
            return False
    return True
