"""A YAML file as plain values that remember their line, so that a complaint can name it.

PyYAML's own loader takes the last of two equal keys without a word, and forgets lines; so the document is built here
from its parsed nodes, with PyYAML's safe rules for scalars.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml

from kvcontrol.core.yaml_text import NO_SUCH_VALUE, TOO_DEEP, Loader
from kvcontrol.presets.errors import PresetFileError

_MOST_SHOWN = 80

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"


@dataclass(slots=True)
class Document:
    """What a file says, the line (from 1) of each key by its dotted path, and what was wrong with it so far."""

    file: str
    root: Value = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def complain(self, path: str, what: str) -> None:
        """Note a problem at a key (or the nearest one above it that is there)."""
        known = path
        while known and known not in self.lines:
            known = known.rpartition(".")[0]
        self.problems.append((self.lines.get(known, 1), f"{path}{what}"))

    def check(self) -> None:
        """Raise ``PresetFileError`` with every problem noted, in the file's order."""
        if self.problems:
            raise PresetFileError("\n".join(f"{self.file}:{line}: {text}" for line, text in sorted(self.problems)))


def parse(text: str, *, file: str) -> Document:
    """Read YAML; raises ``PresetFileError`` for what is no YAML, no mapping, has an alias or names a key twice."""
    document = Document(file=file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise PresetFileError(f"{file}:1: must be a mapping of keys to values")
        document.root = _value(node, "", document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        raise PresetFileError(f"{file}:{line}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError:
        raise PresetFileError(f"{file}:1: not YAML that can be read: {TOO_DEEP}") from None
    document.check()
    return document


def _value(node: yaml.Node, path: str, document: Document) -> Value:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in document.seen:  # PyYAML puts the anchor's own node there, which may even hold itself
        document.complain(path, " is an alias; write the value out")
        return None
    document.seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        return dict(_items(node, path, document))
    if isinstance(node, yaml.SequenceNode):
        return [_value(each, f"{path}.{index}", document) for index, each in enumerate(node.value)]
    scalar = _scalar(node)
    if scalar is None or isinstance(scalar, (str, int, float, bool)):
        return scalar
    document.complain(path, f" is {node.value[:_MOST_SHOWN]}; allowed are text, numbers, true, false and null")
    return None


def _scalar(node: yaml.Node) -> object:
    """Return a value, or the node itself where it is none that can be had."""
    try:
        scalar: object = Loader("").construct_object(node, deep=True)
    except (yaml.YAMLError, *NO_SUCH_VALUE):
        return node
    return scalar


def _items(node: yaml.MappingNode, path: str, document: Document) -> Iterator[tuple[str, Value]]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        place = f"{path}.{key}" if path else key
        document.lines.setdefault(place, key_node.start_mark.line + 1)
        if key in seen:
            first = document.lines[place]
            document.problems.append(
                (key_node.start_mark.line + 1, f"{place} is there twice, first on line {first}; leave one out")
            )
            continue
        seen.add(key)
        yield key, _value(value_node, place, document)
