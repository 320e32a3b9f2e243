"""Which labels a PromQL expression's series have, from the catalogue: a label that none has is a ``ValueError``."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import promql_parser

from dashboards.promql import filled
from dashboards.rules import load_rules
from kvcontrol.series import ENGINE, GATEWAY, LMDEPLOY

_GATEWAY: Final = frozenset({"job", "gateway", "worker"})
_ENGINE: Final = frozenset({"job", "instance"})
"""What scraping adds: the label ``instance`` of a gateway's series is an engine's id, where they have one."""

_PROCESS: Final = _GATEWAY | _ENGINE


def labels_of(expr: str) -> frozenset[str]:
    """Return the labels that series of an expression may have."""
    return _labels(promql_parser.parse(filled(expr))) or frozenset()


@lru_cache(maxsize=1)
def labels_of_samples() -> Mapping[str, frozenset[str]]:
    """Return the labels of every sample that the dashboards may read, but for what rules record."""
    found = {"up": _ENGINE | {"gateway"}}
    for catalogue, scraped in ((GATEWAY, _GATEWAY), (ENGINE, _ENGINE)):
        for each in catalogue:
            for sample in each.samples:
                found[sample] = scraped | set(each.labels) | ({"le"} if sample.endswith("_bucket") else set())
    for name in LMDEPLOY:
        scraped = _ENGINE if name.startswith("lmdeploy:") else found.get(name, _PROCESS)
        found |= {name: scraped, f"{name}_sum": scraped, f"{name}_count": scraped, f"{name}_bucket": scraped | {"le"}}
    return found


def _of_sample(name: str) -> frozenset[str]:
    if (known := labels_of_samples().get(name)) is not None:
        return known
    if name == "ALERTS":
        alerts = [each for each in load_rules() if each.alert]
        return frozenset({"alertname", "alertstate"}).union(
            *(labels_of(each.expr) | set(each.labels) for each in alerts)
        )
    for rule in load_rules():
        if rule.name == name and not rule.alert:
            return labels_of(rule.expr)
    raise ValueError(f"nothing is called {name}")


def _labels(node: Any) -> frozenset[str] | None:
    """Return the labels of a node's series; None for a number or a text."""
    match node:
        case promql_parser.VectorSelector():
            has = _of_sample(node.name)
            _known((each.name for each in node.matchers.matchers), has, node.name)
            return has
        case promql_parser.AggregateExpr():
            return _aggregated(node)
        case promql_parser.BinaryExpr():
            return _joined(node)
        case promql_parser.Call():
            return _called(node)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return None
        case _:
            return _labels(node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node.expr)


def _aggregated(node: Any) -> frozenset[str]:
    inner = _labels(node.expr) or frozenset()
    if node.modifier is None:
        return frozenset()
    _known(node.modifier.labels, inner, "what is aggregated")
    named = frozenset(node.modifier.labels)
    return named if node.modifier.type == promql_parser.AggModifierType.By else inner - named


def _joined(node: Any) -> frozenset[str] | None:
    left, right = _labels(node.lhs), _labels(node.rhs)
    if left is None or right is None:
        return right if left is None else left
    how = node.modifier
    on = None if how is None or how.matching is None else frozenset(how.matching.labels)
    if on is not None:
        _known(on, left & right, "both sides")
    if how is not None and how.card == promql_parser.VectorMatchCardinality.ManyToMany:
        return left | right if _operator(node) == _operator(promql_parser.parse("a or b")) else left
    if how is not None and how.group_labels is not None:
        _known(how.group_labels, right, "the right side")
        return left | frozenset(how.group_labels)
    if on is None and left != right:
        raise ValueError(f"{sorted(left)} is never equal to {sorted(right)}")
    return left if on is None else on


def _called(node: Any) -> frozenset[str] | None:
    inner = [each for each in map(_labels, node.args) if each is not None]
    if not inner:
        return frozenset()
    (has,) = inner
    if node.func.name == "label_replace":
        _known([node.args[3].val], has, "label_replace")
        return has | {node.args[1].val}
    return has - {"le"} if node.func.name == "histogram_quantile" else has


def _operator(node: Any) -> str:
    """Its number: the parser's own objects for two equal operators are not equal."""
    found = re.search(r"TokenType\(\s*(\d+)", repr(node))
    assert found is not None, repr(node)
    return found[1]


def _known(labels: Iterable[str], has: frozenset[str], where: str) -> None:
    if unknown := sorted(set(labels) - has):
        raise ValueError(f"{where} has no {', '.join(unknown)}, but {', '.join(sorted(has))}")


__all__ = ["labels_of", "labels_of_samples"]
