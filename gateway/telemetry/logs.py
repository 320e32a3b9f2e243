"""Log lines: readable text or one JSON object a line. Neither ever holds prompt text or keys."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

FIELDS = "kvgate_fields"
"""Attribute of a log record with the line's own fields, a flat mapping."""


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        fields = getattr(record, FIELDS, None)
        return line if not fields else line + " " + " ".join(f"{key}={value}" for key, value in fields.items())


def formatter(style: Literal["text", "json"]) -> logging.Formatter:
    """Return what makes a line of a record."""
    return _Json() if style == "json" else _Text()


def configure_logging(style: Literal["text", "json"], level: str) -> None:
    """Set up the process's logging to standard error; call once, from ``__main__``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(style))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("asyncio", "uvicorn.error", "httpx2"):  # the last names every health check
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
