"""Reads the text form of a graph: ``parse(render(graph)) == graph``."""

import json
import re
from dataclasses import fields
from typing import Any

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.core.shown import MOST_SHOWN, shown
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import CONFIGS, Device, IRError, IRNode, NodeConfig, NodeType, ValueName

_WORD = r'(?:[A-Za-z0-9_.:/+-]+|"(?:[^"\\]|\\.)*")'
_VALUES = rf"%{_WORD}(?:, %{_WORD})*"
_LINE = re.compile(
    rf"(?:(?P<outputs>{_VALUES}) = )?(?P<type>[a-z]+)(?:\((?P<inputs>{_VALUES})\))?"
    rf" @(?P<device>{_WORD}) \{{(?P<fields>[a-z_]+={_WORD}(?:, [a-z_]+={_WORD})*)\}}"
)
_RESULTS = re.compile(rf"results(?: (?P<values>{_VALUES}))?")
_VALUE = re.compile(rf"%({_WORD})")
_FIELD = re.compile(rf"([a-z_]+)=({_WORD})")
_READERS: dict[str, Any] = {
    "request": str,
    "start": int,
    "end": int,
    "max_tokens": int,
    "batch": int,
    "ttl_s": float,
    "reason": str,
    "tier": CacheTier,
    "keep": CacheTier,
    "target": str,
    "transport": KVTransport,
}


def parse(text: str) -> IRGraph:
    """Read the text form of a graph. Raises ``IRError`` with the number of a line that can't be read, and for a graph
    that is not valid.
    """
    if not isinstance(text, str):
        raise IRError(f"a graph's text form is {shown(text)}; it must be a text")
    nodes: list[IRNode] = []
    results: list[ValueName] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped:
            continue
        if results is not None:
            raise IRError(f"line {number}: {shown(stripped)} comes after the results, which end a graph")
        if match := _RESULTS.fullmatch(stripped):
            results = _names(match["values"])
        elif match := _LINE.fullmatch(stripped):
            nodes.append(_node(number, match))
        else:
            raise IRError(
                f"line {number}: {shown(stripped)} is no node; one looks like "
                "%a = prefill(%b) @engine-0 {request=r1, start=64, end=128}, the last line like results %a"
            )
    if results is None:
        raise IRError("the last line is missing: results, with the values that leave the graph")
    return IRGraph(nodes, results)


def _node(number: int, match: re.Match[str]) -> IRNode:
    try:
        kind = NodeType(match["type"])
    except ValueError:
        allowed = ", ".join(NodeType)
        raise IRError(f"line {number}: unknown node {shown(match['type'])}; known: {allowed}") from None
    return IRNode(
        node_type=kind,
        inputs=tuple(_names(match["inputs"])),
        outputs=tuple(_names(match["outputs"])),
        config=_config(number, kind, match["fields"]),
        device=Device(_unquoted(match["device"])),
    )


def _config(number: int, kind: NodeType, words: str) -> NodeConfig:
    config = CONFIGS[kind]
    known = [each.name for each in fields(config)]
    values: dict[str, Any] = {}
    for name, word in _FIELD.findall(words):
        if name not in known:
            raise IRError(f"line {number}: a {kind} has no {shown(name)}; it has {', '.join(known)}")
        if name in values:
            raise IRError(f"line {number}: {name} is given twice")
        try:
            values[name] = _READERS[name](_unquoted(word))
        except ValueError as error:
            raise IRError(f"line {number}: {name}={word[:MOST_SHOWN]}: {str(error)[: 2 * MOST_SHOWN]}") from None
    try:
        return config(**values)
    except TypeError as error:
        raise IRError(f"line {number}: a {kind} lacks something: {error}") from None


def _names(words: str | None) -> list[ValueName]:
    return [ValueName(_unquoted(word)) for word in _VALUE.findall(words or "")]


def _unquoted(word: str) -> str:
    if not word.startswith('"'):
        return word
    try:
        return str(json.loads(word))
    except ValueError as error:
        raise IRError(f"{word[:MOST_SHOWN]} is no JSON string: {error}") from None
