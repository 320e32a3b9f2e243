"""The page ``docs/metrics.md``: every metric, its meaning, and the dashboards and rules that read it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from dashboards.boards import BOARDS
from dashboards.promql import series_in
from dashboards.rules import load_rules
from kvcontrol.series import ENGINE, GATEWAY, LABELS, LMDEPLOY, Series

_HEAD = """\
# Metrics

Written by `make docs` from the catalogue in `kvcontrol/series`: change it there.

Gateways and engine instances serve Prometheus text on `/metrics`. A gateway also serves OpenMetrics to scrapers that accept
`application/openmetrics-text`. Its latencies then carry the trace id of a request as exemplar, where tracing is on or the client sent a
`traceparent`. An engine serves kvgate's metrics and LMDeploy's own on the same `/metrics`. Histograms have `_bucket`, `_count` and `_sum`.

`dashboards/prometheus/prometheus.yml` scrapes both. The dashboards and rules expect the jobs `kvgate-gateway` (with `honor_labels`) and
`kvgate-engine`. The label `instance` of the second is the engine's id at the gateway.
"""


def usage() -> dict[str, list[str]]:
    """Return for each series what reads it: dashboards by their uid, rules by their name."""
    used: dict[str, list[str]] = defaultdict(list)
    for board in BOARDS:
        for name in sorted({name for panel in board.panels for each in panel.queries for name in series_in(each.expr)}):
            used[name].append(board.uid.removeprefix("kvgate-"))
    for rule in load_rules():
        for name in sorted(series_in(rule.expr)):
            used[name].append(rule.name)
    return dict(used)


def reference() -> str:
    """Return the page."""
    used = usage()
    lines = [
        _HEAD,
        "## A gateway\n",
        *_table(GATEWAY, used),
        "\n## An engine instance\n",
        *_table(ENGINE, used),
        "\n## LMDeploy's and the client library's\n",
        "Metrics that dashboards and rules read; LMDeploy has more. LMDeploy's names contain colons, which `promtool check metrics` reports, and",
        "`lmdeploy:iteration_tokens_total` is a histogram. kvgate leaves LMDeploy's names as they are.\n",
        "| metric | is | read by |",
        "|---|---|---|",
        *(f"| `{name}` | {text} | {_readers(used.get(name, []))} |" for name, text in LMDEPLOY.items()),
        "\n## Labels\n",
        "No label contains text written by a client.\n",
        "| label | values |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in LABELS.items()),
        "\n## Recorded\n",
        "| metric | read by |",
        "|---|---|",
        *(f"| `{each.name}` | {_readers(used.get(each.name, []))} |" for each in load_rules() if not each.alert),
    ]
    return "\n".join(lines) + "\n"


def _table(series: Iterable[Series], used: dict[str, list[str]]) -> Iterator[str]:
    yield "| metric | type | unit | labels | meaning | read by |"
    yield "|---|---|---|---|---|---|"
    for each in series:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        there = f" Present {each.appears}." if each.appears else ""
        text = each.help.replace("|", "\\|") + there
        yield f"| `{each.exposed}` | {each.kind} | {each.unit} | {labels} | {text} | {_readers(used.get(each.exposed, []))} |"


def _readers(names: Iterable[str]) -> str:
    return ", ".join(names)
