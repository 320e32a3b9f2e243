"""A graph as text, one node a line: stable, so that tests, logs and the admin API can show and compare it.

    %cached = load @engine-0 {request=r1, start=0, end=1536, tier=HBM}
    %fresh = prefill(%cached) @engine-0 {request=r1, start=1536, end=2048}
    %answer, %tail = decode(%cached, %fresh) @engine-0 {request=r1, start=2048, max_tokens=256}
    results %answer, %tail

Words that are not plain are JSON strings. A field that is None is left out. ``lab/research/ir/reader.py`` reads
it back.
"""

import json
import re
from dataclasses import fields
from enum import StrEnum

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import IRNode, NodeConfig, ValueName

_PLAIN = re.compile(r"[A-Za-z0-9_.:/+-]+")


def render(graph: IRGraph) -> str:
    """Return the text form, with the nodes in their own order."""
    results = ", ".join(_value(each) for each in graph.results)
    return "\n".join([*map(render_node, graph.nodes), f"results {results}".rstrip(), ""])


def render_node(node: IRNode) -> str:
    """Return one node's line, without its end."""
    head = ", ".join(_value(each) for each in node.outputs) + " = " if node.outputs else ""
    taken = "(" + ", ".join(_value(each) for each in node.inputs) + ")" if node.inputs else ""
    words = ", ".join(f"{name}={_word(value)}" for name, value in _parameters(node.config))
    return f"{head}{node.node_type}{taken} @{_word(node.device)} {{{words}}}"


def _parameters(config: NodeConfig) -> list[tuple[str, str]]:
    words = []
    for each in fields(config):
        value = getattr(config, each.name)
        if value is not None:
            words.append((each.name, value.value if isinstance(value, StrEnum) else str(value)))
    return words


def _value(name: ValueName) -> str:
    return f"%{_word(name)}"


def _word(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
