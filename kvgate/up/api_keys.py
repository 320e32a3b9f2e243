"""API keys as people give them: on the command line, in a file, or in the gateway's own variable."""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvgate.failure import CommandError

_HOW = "KEY or TENANT:KEY, like acme:sk-123"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that clients present, and whose requests they are. ``shown`` says whether it was typed, so that it may be
    printed as well.
    """

    key: str = field(repr=False)
    tenant: str
    shown: bool = True

    @classmethod
    def parse(cls, text: str) -> "ApiKey":
        """Read ``KEY`` or ``TENANT:KEY``; raises ``CommandError``."""
        tenant, separator, key = text.rpartition(":")
        if not key.strip() or (separator and not tenant):
            raise CommandError(f"--api-key is empty; write {_HOW}")
        return cls(key=key, tenant=tenant or "default")

    @classmethod
    def from_file(cls, path: Path) -> tuple["ApiKey", ...]:
        """Read one key a line; empty lines and those that begin with # are left out. Raises ``CommandError``.

        A file that other users can read is refused: it would be no better than the command line.
        """
        try:
            with path.open(encoding="utf-8") as file:
                mode = os.fstat(file.fileno()).st_mode
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(
                f"--api-key-file {path} cannot be read: {error}", f"the file needs one key per line: {_HOW}"
            ) from None
        if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRGRP:
            raise CommandError(f"--api-key-file {path} is readable by other users", f"chmod 600 {path}")
        keys: list[ApiKey] = []
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            tenant, separator, key = line.rpartition(":")
            if not key.strip() or (separator and not tenant):
                raise CommandError(
                    f"--api-key-file {path}: line {number} contains no key", f"write each line as {_HOW}"
                )
            keys.append(cls(key=key, tenant=tenant or "default", shown=False))
        if not keys:
            raise CommandError(f"--api-key-file {path} contains no key", f"the file needs one key per line: {_HOW}")
        return tuple(keys)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> tuple["ApiKey", ...]:
        """Read the gateway's own ``KVGATE_API_KEYS``, empty when it isn't set; raises ``CommandError``."""
        text = environment.get("KVGATE_API_KEYS") or "[]"
        try:
            return tuple(
                cls(key=str(item["key"]), tenant=str(item["tenant"]), shown=False) for item in json.loads(text)
            )
        except (ValueError, TypeError, KeyError) as error:
            raise CommandError(
                "KVGATE_API_KEYS is not a list of keys",
                """write JSON like [{"key": "sk-123", "tenant": "acme"}], or use --api-key-file FILE""",
            ) from error


def chosen_keys(typed: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    """Return the keys of the options, or those of the environment where there are none; raises ``CommandError``."""
    given = (*(ApiKey.parse(text) for text in typed), *(ApiKey.from_file(file) if file is not None else ()))
    return given or ApiKey.from_environment()
