"""The dashboards' queries, asked of a real Prometheus."""

from collections.abc import Callable, Mapping

from dashboards.boards import BOARDS
from dashboards.panel import Proof, Query
from dashboards.promql import filled
from tests.support.processes import eventually
from tests.support.prometheus import Prometheus

_RATE_INTERVAL = "30s"


def queries_of(*proofs: Proof) -> dict[str, Query]:
    """Return the queries that must find data there, by where they stand."""
    return {
        f"{board.title} / {panel.title}: {query.expr}": query
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
        if query.proof in proofs
    }


def finds(prometheus: Prometheus, query: Query, *, instance: str = "engine-0") -> bool:
    """Return whether a query finds data now."""
    return bool(prometheus.values(filled(query.expr, rate_interval=_RATE_INTERVAL, instance=instance)))


def until_all_find(
    prometheus: Prometheus,
    queries: Mapping[str, Query],
    *,
    instance: str = "engine-0",
    also: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until every query has found data; fails with those that never did."""
    missing = dict(queries)

    def all_there() -> bool:
        for where, query in list(missing.items()):
            if finds(prometheus, query, instance=instance):
                del missing[where]
        return also() and not missing

    try:
        eventually(all_there, 300.0, "data for every query")
    except AssertionError as error:
        raise AssertionError(f"{prometheus.up()}\n{prometheus.unhealthy_rules()}\n" + "\n".join(missing)) from error


__all__ = ["finds", "queries_of", "until_all_find"]
