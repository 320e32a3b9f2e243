"""Which modules a module leads to, read from their source: imports anywhere in it, and modules named by string.

A package's ``__init__`` that hands a name on doesn't reach the module where the name is defined; who imports the name
does, and an ``__init__`` that uses it. Otherwise a package would reach all its parts by listing them.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Source:
    """What one module imports."""

    is_package: bool
    modules: set[str] = field(default_factory=set)
    """Imported or named as modules."""
    names: set[tuple[str, str, str]] = field(default_factory=set)
    """Imported by name: what it is called here, from which module, what."""
    used: set[str] = field(default_factory=set)
    """Names that its code uses."""


class Sources:
    """The modules of some packages below a folder, by dotted name."""

    def __init__(self, root: Path, packages: tuple[str, ...]) -> None:
        self._files = {
            _dotted(path.relative_to(root)): path for package in packages for path in (root / package).rglob("*.py")
        }
        self._read: dict[str, Source] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def reached(self, *entries: str) -> set[str]:
        """Return the modules that running these reaches, they included."""
        found: set[str] = set()
        waiting = list(entries)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._leads_to(name))
        return found

    def is_program(self, name: str) -> bool:
        """Whether a module does something when it is run by ``python -m``."""
        return '__name__ == "__main__"' in self._files[name].read_text(encoding="utf-8")

    def _leads_to(self, name: str) -> Iterator[str]:
        source = self._source(name)
        yield from source.modules
        if "." in name:
            yield name.rpartition(".")[0]
        for local, module, imported in source.names:
            if not source.is_package or local in source.used:
                yield from self._defined(module, imported)

    def _defined(self, module: str, name: str) -> Iterator[str]:
        """Where a name that is imported from a module is defined, and what is passed on the way."""
        yield module
        if f"{module}.{name}" in self._files:
            yield f"{module}.{name}"
        elif (source := self._source(module)).is_package:
            for local, origin, imported in source.names:
                if local == name:
                    yield from self._defined(origin, imported)

    def _source(self, name: str) -> Source:
        if name not in self._read:
            self._read[name] = self._parsed(name)
        return self._read[name]

    def _parsed(self, name: str) -> Source:
        path = self._files[name]
        source = Source(is_package=path.name == "__init__.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    source.modules |= {each.name for each in names} & self._files.keys()
                case ast.ImportFrom(module=str(module), level=0, names=names) if module in self._files:
                    source.names |= {(each.asname or each.name, module, each.name) for each in names}
                case ast.Constant(value=str(text)) if text in self._files and "." in text:
                    source.modules.add(text)
                case ast.Name(id=used):
                    source.used.add(used)
        return source


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


__all__ = ["Sources"]
