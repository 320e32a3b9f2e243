"""Reads traces that say when requests came and how long they were, and nothing of what they shared.

Azure's: CSV with the columns ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``, plain or gzipped. A request of
it has no blocks: nothing of its prompt is known to have been another's.
"""

import csv
from array import array
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kvcontrol.core.shown import shown
from lab.traces import fields
from lab.traces.reader import (
    AZURE_COLUMNS,
    UNREADABLE,
    Lines,
    TraceError,
    has_lengths_alone,
    read_trace,
    why_unreadable,
)
from lab.traces.request import Request

_MOST_DIGITS = 20


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
    return has_lengths_alone(first)


def _azure(path: Path) -> Iterator[Request]:
    lines = Lines(path)
    try:
        for row in csv.DictReader(lines):
            yield Request(
                block_ids=array("q"),
                block_tokens=1,
                prompt_tokens=_count(_column(row, AZURE_COLUMNS[1])),
                at_s=_moment(_column(row, AZURE_COLUMNS[0])),
                output_tokens=_count(_column(row, AZURE_COLUMNS[2])),
            )
    except (csv.Error, *UNREADABLE) as error:
        raise TraceError(f"{path}, line {lines.number}: {why_unreadable(error)}") from error


def _column(row: Mapping[str, str | None], name: str) -> str:
    text = row.get(name)
    if text is None:
        raise ValueError(f"{name} is missing")
    return text.strip()


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text[:26])  # seven digits of a second are more than Python reads
    except ValueError as error:
        raise ValueError(f"{shown(text)} is no time; that is like 2023-11-16 18:15:46.68") from error
    return fields.seconds((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ValueError(f"{shown(text)} is no number of tokens")
    return fields.tokens(int(text))
