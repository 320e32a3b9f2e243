"""Reads traces that say when requests came and how long they were, and nothing of what they shared.

Azure's: CSV with the columns ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``, plain or gzipped. A request of
it has no blocks: nothing of its prompt is known to have been another's.
"""

import csv
from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from kvcontrol.traces.reader import UNREADABLE, Lines, TraceError, read_trace
from kvcontrol.traces.request import Request

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_requests(path: Path) -> list[Request]:
    """Return a trace's requests ordered by when they came, with blocks or without, by what its first line says.

    Raises ``TraceError`` for what is no trace, ``OSError``.
    """
    if _is_csv(path):
        return sorted(_azure(path), key=_at)
    return sorted(read_trace(path), key=_at)


def _at(request: Request) -> float:
    return request.at_s


def _is_csv(path: Path) -> bool:
    try:
        first = next(iter(Lines(path)), "")
    except UNREADABLE:  # read_trace says what is wrong with it
        return False
    return first.lstrip("\ufeff").startswith(_COLUMNS[0])


def _azure(path: Path) -> Iterator[Request]:
    lines = Lines(path)
    try:
        for row in csv.DictReader(lines):
            # Seven digits of a second are more than Python reads.
            moment = datetime.fromisoformat(row[_COLUMNS[0]].strip()[:26])
            yield Request(
                block_ids=array("q"),
                block_tokens=1,
                prompt_tokens=_count(row[_COLUMNS[1]]),
                at_s=(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(),
                output_tokens=_count(row[_COLUMNS[2]]),
            )
    except (KeyError, TypeError, AttributeError, csv.Error, *UNREADABLE) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}, line {lines.number}: {why}") from error


def _count(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is no number of tokens")
    return int(text)


__all__ = ["read_requests"]
