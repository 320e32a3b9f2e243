"""Reads traces in Mooncake's and in the agentic format, plain or gzipped, told apart by their first line.

Mooncake's: one JSON object a line with ``timestamp`` (ms), ``input_length`` and ``hash_ids``, chained ids of 512-token
blocks, the last partial one included. Agentic: ``session``, ``t`` (s), ``in`` (tokens) and ``runs``, run-lengths of
64-token block ids that are local to the session.

A line whose blocks aren't those of a prompt of its length is refused: as many as it fills, the partial one too or not.
"""

import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvcontrol.core.shown import shown
from lab.traces import fields
from lab.traces.request import Request

_MOONCAKE_BLOCK_TOKENS = 512
_AGENTIC_BLOCK_TOKENS = 64
_SESSION_BLOCKS = 1 << 20
"""Ids of the agentic trace are local to a session; sessions are laid this far apart."""
_FORMATS = "; taken are JSON lines with hash_ids (Mooncake) or runs (agentic), plain or gzipped"
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_GZIP = b"\x1f\x8b"


MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
AGENTIC = "agentic/agentic_dev.jsonl.gz"
"""Where the public traces lie in a folder of traces."""


UNREADABLE = (ValueError, EOFError, zlib.error)
"""What reading a file raises, beside ``OSError``, that is no text, or of whose archive only a part is there."""


class TraceError(ValueError):
    """A file is no trace of blocks; the message names file, line and what is wrong."""


def read_trace(path: Path) -> Iterator[Request]:
    """Yield a trace's requests in the file's order; raises ``TraceError`` for what isn't one, ``OSError``."""
    read: Callable[[dict[str, Any]], Request] | None = None
    lines = Lines(path)
    try:
        for line in lines:
            if read is None and has_lengths_alone(line):
                raise ValueError(
                    "Azure's format has arrivals and lengths, and no blocks that policies could keep; kvgate plan, "
                    "kvgate simulate and kvgate replay --url take it"
                )
            said = _object(line)
            if read is None:
                read = _reader_of(said)
            yield read(said)
    except (RecursionError, *UNREADABLE) as error:
        formats = _FORMATS if read is None and isinstance(error, json.JSONDecodeError) else ""
        raise TraceError(f"{path}, line {lines.number}: {why_unreadable(error)}{formats}") from error
    if read is None:
        raise TraceError(f"{path} is empty")


def read_by_time(path: Path) -> list[Request]:
    """Return a trace's requests ordered by when they came, as if all sessions of it had started at once."""
    return sorted(read_trace(path), key=attrgetter("at_s"))


class Lines:
    """A file's lines that are not blank, unzipped where they are zipped; raises ``OSError`` and ``UNREADABLE``."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        """Of the line that is being read, blank ones counted: the one to name when something is wrong."""
        self._path = path

    def __iter__(self) -> Iterator[str]:
        self.number = 0
        with self._path.open("rb") as file, ExitStack() as opened:  # opened once: it may be a pipe
            zipped = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
            lines = opened.enter_context(gzip.open(file, "rb")) if zipped else file
            while True:
                self.number += 1
                line = lines.readline().decode("utf-8")
                if not line:
                    return
                if line.strip():
                    yield line


def has_lengths_alone(line: str) -> bool:
    """Whether a file's first line is that of Azure's format."""
    return line.lstrip("\ufeff").startswith(AZURE_COLUMNS[0])


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's, about a way to let it read more digits
        raise ValueError("a number has more digits than are read") from error


def _reader_of(said: Any) -> Callable[[Any], Request]:
    if isinstance(said, dict) and "hash_ids" in said:
        return _mooncake
    if isinstance(said, dict) and "runs" in said:
        return _Agentic()
    raise ValueError("neither hash_ids (Mooncake) nor runs (agentic): requests without blocks can't be replayed")


def _mooncake(said: Any) -> Request:
    said = _line(said)
    ids = array("q", [fields.block(each) for each in fields.listed(fields.field(said, "hash_ids"), "blocks")])
    prompt_tokens = fields.tokens(fields.field(said, "input_length"))
    fields.fit(ids, prompt_tokens, _MOONCAKE_BLOCK_TOKENS)
    return Request(
        block_ids=ids,
        block_tokens=_MOONCAKE_BLOCK_TOKENS,
        prompt_tokens=prompt_tokens,
        at_s=fields.seconds(said.get("timestamp", 0), per_second=1000),
        output_tokens=fields.tokens(said["output_length"]) if "output_length" in said else None,
    )


class _Agentic:
    def __init__(self) -> None:
        self._sessions: dict[str | int, int] = {}

    def __call__(self, said: Any) -> Request:
        said = _line(said)
        session = fields.field(said, "session")
        if not isinstance(session, str | int):
            raise ValueError(f"{shown(session)} is no session; that is a name or a number")  # noqa: TRY004
        base = self._sessions.setdefault(session, len(self._sessions)) * _SESSION_BLOCKS
        ids = array("q")
        for run in fields.listed(fields.field(said, "runs"), "runs"):
            start, length = _run(run)
            ids.extend(range(base + start, base + start + length))
        prompt_tokens = fields.tokens(fields.field(said, "in"))
        fields.fit(ids, prompt_tokens, _AGENTIC_BLOCK_TOKENS)
        return Request(
            block_ids=ids,
            block_tokens=_AGENTIC_BLOCK_TOKENS,
            prompt_tokens=prompt_tokens,
            at_s=fields.seconds(fields.field(said, "t")),
            output_tokens=fields.tokens(said["out"]) if "out" in said else None,
            session=str(session),
        )


def _line(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise ValueError(f"{shown(said)} is no request; that is an object")  # noqa: TRY004
    return said


def _run(said: Any) -> tuple[int, int]:
    match said:
        case [start, length]:
            start, length = fields.block(start), fields.block(length)
        case _:
            raise ValueError(f"{shown(said)} is no run; that is [start, length]")
    if start + length > _SESSION_BLOCKS:
        raise ValueError(f"run [{start}, {length}] is outside of a session's {_SESSION_BLOCKS} blocks")
    return start, length


def why_unreadable(error: Exception) -> str:
    """Return what is wrong with a line, or with the file that it is to come from."""
    match error:
        case json.JSONDecodeError():
            return f"not JSON ({error})"
        case UnicodeDecodeError():
            return "not text in UTF-8"
        case RecursionError():
            return "nested too deeply"
        case EOFError():
            return "the archive is cut off"
        case zlib.error():
            return "the archive is damaged"
        case _:
            return str(error)
