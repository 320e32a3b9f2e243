"""One mapping of a file, read key by key against what is allowed there.

Every problem is noted and reading goes on with a value that is allowed, so that one run shows all problems; what was
read counts only if ``Document.check`` raises nothing afterwards. A plain reader rather than a schema library: pydantic
isn't known to ``kvcontrol``, and msgspec stops at the first problem and tells neither the value nor the names that
would be allowed.
"""

import re
from collections.abc import Collection, Iterator

from kvcontrol.presets.document import Document, Value

_SIZE = re.compile(r"([1-9]\d*)(MiB|GiB|TiB)")
_UNIT_BYTES = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Section:
    """Reads the mapping at ``path``; ``finish`` complains of keys that nobody asked for."""

    def __init__(self, document: Document, value: Value, path: str) -> None:
        self._document = document
        self._path = path
        self._read_keys: list[str] = []
        if not isinstance(value, dict):
            state = "is missing" if value is None else f"is {value!r}"
            document.complain(path, f" {state}; it must be a mapping of keys to values")
            value = {}
        self._values = value

    def text(self, key: str) -> str:
        value = self._take(key)
        if isinstance(value, str) and value.strip():
            return value
        self._refuse(key, value, "it must be text")
        return "-"

    def path(self, key: str) -> str:
        """Return the absolute path of a file."""
        value = self._take(key)
        if isinstance(value, str) and value.startswith("/") and not value.endswith("/"):
            return value
        self._refuse(key, value, "it must be the absolute path of a file")
        return "/"

    def choice(self, key: str, allowed: Collection[str]) -> str:
        value = self._take(key)
        if isinstance(value, str) and value in allowed:
            return value
        self._refuse(key, value, f"allowed: {', '.join(allowed)}")
        return next(iter(allowed))

    def integer(self, key: str, least: int, most: int) -> int:
        value = self._take(key)
        if type(value) is int and least <= value <= most:
            return value
        self._refuse(key, value, f"it must be a whole number from {least} to {most}")
        return least

    def number(self, key: str, least: float, most: float) -> float:
        """Return a number of a closed range."""
        value = self._take(key)
        if type(value) in {int, float} and least <= value <= most:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        self._refuse(key, value, f"it must be a number from {least:g} to {most:g}")
        return least

    def size(self, key: str) -> int:
        """Return bytes."""
        value = self._take(key)
        found = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if found:
            return int(found[1]) * _UNIT_BYTES[found[2]]
        self._refuse(key, value, "it must be a whole number of MiB, GiB or TiB, like 64GiB")
        return 1

    def texts(self, key: str, allowed: Collection[str] | None = None) -> tuple[str, ...]:
        """Return a list of texts, each of ``allowed`` where that is given; ``all`` stands for those."""
        value = self._take(key)
        if allowed is not None and value == "all":
            return tuple(allowed)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._refuse(key, value, "it must be a list of texts")
            return ()
        texts = tuple(str(each) for each in value)
        for index, each in enumerate(texts):
            if allowed is not None and each not in allowed:
                self._refuse(f"{key}.{index}", each, f"allowed: {', '.join(allowed)}")
        return texts

    def section(self, key: str) -> "Section":
        return Section(self._document, self._take(key), self._join(key))

    def sections(self) -> Iterator[tuple[str, "Section"]]:
        """Yield every key of this mapping as a section of its own."""
        for key in self._values:
            yield key, self.section(key)

    def has(self, key: str) -> bool:
        """Tell whether a key that may be left out or null has a value."""
        self._read_keys.append(key)
        return self._values.get(key) is not None

    def refuse(self, key: str, what: str) -> None:
        """Note that the value of a key, here or further down, doesn't go together with others."""
        value: Value = self._values
        for each in key.split("."):
            value = value.get(each) if isinstance(value, dict) else None
        self._refuse(key, value, what)

    def finish(self) -> None:
        """Note every key that was never asked for."""
        for key in self._values:
            if key not in self._read_keys:
                allowed = ", ".join(dict.fromkeys(self._read_keys))
                self._document.complain(self._join(key), f" is not a known key; allowed: {allowed}")

    def _take(self, key: str) -> Value:
        self._read_keys.append(key)
        return self._values.get(key)

    def _join(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _refuse(self, key: str, value: Value, what: str) -> None:
        state = f"is {value!r}" if key.partition(".")[0] in self._values else "is missing"
        self._document.complain(self._join(key), f" {state}; {what}")
