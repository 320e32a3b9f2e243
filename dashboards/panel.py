"""What a dashboard is, before it is Grafana's JSON: rows of panels, each with queries, a unit and a description."""

from dataclasses import dataclass
from enum import StrEnum


class Look(StrEnum):
    """How a panel shows its queries."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    TABLE = "table"
    HEATMAP = "heatmap"


class Shown(StrEnum):
    """Grafana's names of units."""

    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    SHARE = "percentunit"
    COUNT = "short"
    PER_SECOND = "ops"
    REQUESTS_PER_SECOND = "reqps"
    TOKENS = "suffix: tokens"
    TOKENS_PER_SECOND = "suffix: tokens/s"
    BLOCKS = "suffix: blocks"
    BLOCKS_PER_SECOND = "suffix: blocks/s"
    REQUESTS = "suffix: requests"
    TIMES = "suffix: times"
    CORES = "suffix: cores"
    STATE = "bool_on_off"


class Proof(StrEnum):
    """The tests in which a query must find data in a Prometheus."""

    FLEET = "two equal engines with tiers and traces, and tenants under load"
    SEPARATED = "a prefill and a decode instance"
    WORKERS = "a gateway of several workers"
    ACCIDENTS = "requests, loops and events that fail"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL with Grafana's variables. ``quiet`` says why it finds nothing on the fleet of ``Proof.FLEET``, if that is
    not its proof.
    """

    expr: str
    legend: str = ""
    quiet: str = ""
    proof: Proof = Proof.FLEET


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """``empty`` is what it says when there is nothing to show; ``width`` is of 24 columns."""

    title: str
    about: str
    unit: Shown
    queries: tuple[Query, ...]
    look: Look = Look.LINES
    width: int = 8
    empty: str = "nothing yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard; ``uid`` is its address in Grafana and its file's name."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    by_instance: bool = False
    """Whether it has the variable ``$instance``, an engine instance's id."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def lines(title: str, about: str, unit: Shown, *queries: Query, width: int = 8, empty: str = "nothing yet") -> Panel:
    """Return a panel of lines over time."""
    return Panel(title=title, about=about, unit=unit, queries=queries, width=width, empty=empty)


def stacked(title: str, about: str, unit: Shown, *queries: Query, width: int = 8, empty: str = "nothing yet") -> Panel:
    """Return a panel of areas on top of each other."""
    return Panel(title=title, about=about, unit=unit, queries=queries, look=Look.STACKED, width=width, empty=empty)


def number(title: str, about: str, unit: Shown, expr: str, *, width: int = 4) -> Panel:
    """Return a panel of the present value."""
    return Panel(title=title, about=about, unit=unit, queries=(Query(expr=expr),), look=Look.NUMBER, width=width)


def query(expr: str, legend: str = "") -> Query:
    """Return a query that finds data wherever there is load."""
    return Query(expr=expr, legend=legend)


def quiet(why: str, proof: Proof, expr: str, legend: str = "") -> Query:
    """Return a query that finds nothing on a fleet of equal engines that is well."""
    return Query(expr=expr, legend=legend, quiet=why, proof=proof)


def rate(series: str, by: str = "", where: str = "") -> str:
    """Return a counter's rate a second, summed up to the labels ``by``."""
    return f"sum{f' by ({by})' if by else ''} (rate({series}{{{where}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", where: str = "") -> str:
    """Return a quantile of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{{where}}}[$__rate_interval])))"


def quantiles(histogram: str, where: str = "") -> tuple[Query, Query, Query]:
    """Return median, 95th and 99th percentile."""
    return (
        query(quantile(0.5, histogram, where=where), "p50"),
        query(quantile(0.95, histogram, where=where), "p95"),
        query(quantile(0.99, histogram, where=where), "p99"),
    )


def mean(histogram: str, by: str = "", where: str = "") -> str:
    """Return a histogram's mean."""
    return f"{rate(f'{histogram}_sum', by, where)} / {rate(f'{histogram}_count', by, where)}"
