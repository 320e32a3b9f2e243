"""What a PromQL expression reads."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import promql_parser

from kvcontrol.series import ENGINE, GATEWAY, LMDEPLOY

_INNER: Final = ("lhs", "rhs", "expr", "param", "vector_selector")
_SUFFIXES: Final = ("", "_bucket", "_count", "_sum")


def filled(expr: str, *, rate_interval: str = "1m", instance: str = "engine-0") -> str:
    """Return an expression with Grafana's variables replaced."""
    return expr.replace("$__rate_interval", rate_interval).replace("$instance", instance)


@lru_cache(maxsize=1024)
def selected(expr: str) -> frozenset[str]:
    """Return the names of the samples that an expression selects; ``ValueError`` when it can't be parsed."""
    return frozenset(_selectors(promql_parser.parse(filled(expr))))


def series_in(expr: str) -> frozenset[str]:
    """Return the series that an expression reads, under the names that they are exposed under."""
    known = series_of_samples()
    return frozenset(known.get(name, name) for name in selected(expr))


@lru_cache(maxsize=1)
def series_of_samples() -> Mapping[str, str]:
    """Return every name of a sample that the catalogue knows, ours and LMDeploy's, and its series."""
    ours = {sample: each.exposed for each in (*GATEWAY, *ENGINE) for sample in each.samples}
    return {f"{name}{suffix}": name for name in LMDEPLOY for suffix in _SUFFIXES} | ours


def _selectors(node: Any) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        if not node.name:
            raise ValueError(f"a selector without a name: {node.prettify()}")
        yield node.name
        return
    for attribute in _INNER:
        if (inner := getattr(node, attribute, None)) is not None:
            yield from _selectors(inner)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)
