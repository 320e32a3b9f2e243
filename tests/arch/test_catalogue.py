"""One catalogue: what it declares is what is exposed, documented, shown and alarmed on, and nothing else is."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import alerting

from dashboards.boards import BOARDS
from dashboards.build import built, stale
from dashboards.panel import Board, Panel, Proof, Query
from dashboards.promql import selected, series_in, series_of_samples
from dashboards.reference import usage
from dashboards.rules import Rule, load_rules
from kvcontrol.series import ENGINE, GATEWAY, LABELS, LMDEPLOY, Kind, Series
from kvcontrol.series import gateway as gateway_catalogue
from kvcontrol.series.engine import handovers, policies, process, schedule, tiers
from tests.support.promql_labels import labels_of

ROOT = Path(__file__).parents[2]
ALL = (*GATEWAY, *ENGINE)
RULES = load_rules()
QUERIES = [
    pytest.param(board, panel, query, id=f"{board.uid}: {panel.title} {query.legend}")
    for board in BOARDS
    for panel in board.panels
    for query in panel.queries
]


def test_every_series_has_one_name() -> None:
    names = [each.exposed for each in ALL]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("series", ALL, ids=lambda each: each.name)
def test_a_series_is_named_as_prometheus_wants(series: Series) -> None:
    assert re.fullmatch(r"(kvgate|kv_policy)_[a-z0-9_]*[a-z0-9]", series.name)
    assert not series.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
    assert not re.search(r"_(ms|milliseconds|kb|mb|gb|percent|counter|gauge|histogram)(_|$)", series.name)
    assert not series.help[0].islower()
    assert series.help.endswith(".")
    assert (series.kind is Kind.HISTOGRAM) == bool(series.buckets)
    assert list(series.buckets) == sorted(set(series.buckets))
    assert set(series.labels) <= LABELS.keys()


def test_no_label_is_explained_that_no_series_has() -> None:
    assert LABELS.keys() - {label for each in ALL for label in each.labels} == set()


@pytest.mark.parametrize(
    ("catalogues", "folders"),
    [
        ([gateway_catalogue], ["gateway"]),
        ([handovers, policies, process, schedule, tiers], ["engines/control", "engines/lmdeploy"]),
    ],
)
def test_every_series_of_the_catalogue_is_filled_somewhere(catalogues: list[object], folders: list[str]) -> None:
    declared = {name for each in catalogues for name, value in vars(each).items() if isinstance(value, Series)}
    used = {
        node.attr
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "catalogue"
    }
    assert used == declared


@pytest.mark.parametrize("folder", ["gateway", "engines", "kvgate", "lab"])
def test_no_series_is_declared_beside_the_catalogue(folder: str) -> None:
    makers = {"Counter", "Gauge", "Histogram", "Summary", "CounterMetricFamily", "GaugeMetricFamily"}
    beside = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in makers
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    assert beside == []


def test_pages_and_dashboards_are_what_the_catalogue_makes_of_them() -> None:
    assert stale(built()) == []


def test_every_series_is_shown_on_a_dashboard() -> None:
    shown = {
        name for board in BOARDS for panel in board.panels for each in panel.queries for name in series_in(each.expr)
    }
    assert {each.exposed for each in ALL} - shown == set()
    assert LMDEPLOY.keys() - usage().keys() == set()


@pytest.mark.parametrize(("board", "panel", "query"), QUERIES)
def test_a_query_reads_what_exists(board: Board, panel: Panel, query: Query) -> None:
    recorded = {each.name for each in RULES if not each.alert}
    assert selected(query.expr) - series_of_samples().keys() - recorded - {"ALERTS"} == set()
    assert "$instance" not in query.expr or board.by_instance
    assert (query.legend == "") == (len(panel.queries) == 1 and panel.look == "number")
    assert (query.quiet == "") == (query.proof is Proof.FLEET)
    assert set(re.findall(r"{{ *(\w+) *}}", query.legend)) - labels_of(query.expr) == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda each: each.name)
def test_a_rule_reads_what_exists(rule: Rule) -> None:
    recorded = {each.name for each in RULES if not each.alert}
    assert selected(rule.expr) - series_of_samples().keys() - recorded == set()
    told = {label for text in rule.annotations.values() for label in re.findall(r"\$labels\.(\w+)", text)}
    assert told - labels_of(rule.expr) == set()


@pytest.mark.parametrize(
    ("expr", "labels"),
    [
        ("sum by (tier) (kvgate_engine_resident_blocks)", {"tier"}),
        ("sum by (le) (rate(kvgate_first_byte_seconds_bucket[5m]))", {"le"}),
        ("sum without (job) (kvgate_requests_in_flight)", {"gateway", "instance", "worker"}),
        ("sum(up) or vector(0)", set()),
        ("sum by (stage) (kvgate_requests_total)", None),
        ('kvgate_requests_total{tier="HBM"}', None),
        ("sum by (tenant) (kvgate_tenant_quota) / sum by (quota) (kvgate_tenant_quota)", None),
        ("kvgate_no_such_series", None),
    ],
)
def test_labels_of_expressions_are_found(expr: str, labels: set[str] | None) -> None:
    if labels is None:
        with pytest.raises(ValueError, match=r"has no|never equal|nothing is called"):
            labels_of(expr)
    else:
        assert labels_of(expr) == labels


@pytest.mark.parametrize(
    "rule", [each for each in RULES if re.search(r"increase\(.*> 0", each.expr)], ids=lambda each: each.name
)
def test_what_alarms_at_its_first_event_is_0_before_it(rule: Rule) -> None:
    """A counter that begins with its first event does not increase by it."""
    appears = {each.exposed: each.appears for each in ALL}
    assert [name for name in selected(rule.expr) if re.search("(after|with) the first", appears[name])] == []


@pytest.mark.parametrize("rule", [each for each in RULES if each.alert], ids=lambda each: each.name)
def test_an_alert_names_the_section_that_says_what_to_do_and_it_is_there(rule: Rule) -> None:
    page, _, anchor = rule.runbook.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    (section,) = re.findall(rf"(?ms)^#### {rule.name}\n(.*?)(?=^##|\Z)", text)
    assert anchor == rule.name.lower()
    assert "*Look at:*" in section
    assert "*Do:*" in section
    titles = {panel.title for board in BOARDS for panel in board.panels}
    named = re.findall(r"\*([A-Z][^*:]+)\*", section.replace("\n", " "))
    assert set(named) - titles == set(), "panels that it sends to exist"


def test_every_link_within_the_handbook_leads_somewhere() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^#{2,} (.+)$", text)
    anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) - anchors == set()


def test_every_recorded_series_is_read() -> None:
    assert {each.name for each in RULES if not each.alert} - usage().keys() == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda each: each.uid)
def test_every_panel_has_a_unit_a_description_and_says_what_it_means_when_it_is_empty(board: Board) -> None:
    for panel in board.panels:
        assert panel.unit
        assert panel.about.endswith("."), panel.title
        assert panel.empty
        assert panel.queries
        assert panel.width in {4, 6, 8, 12, 16, 24}
    assert len({(row.title, panel.title) for row in board.rows for panel in row.panels}) == len(board.panels)


PROVISIONED = ROOT / "deploy" / "grafana" / "provisioning"


def unknown(model: type[Any], given: dict[str, Any]) -> set[str]:
    """Return what Grafana's own model does not take of an object: it leaves out what it does not know."""
    taken = json.loads(JSONEncoder().encode(model.from_json(given)))
    return {name for name, value in given.items() if taken.get(name) != value}


def test_every_alert_of_prometheus_has_its_twin_in_grafana() -> None:
    groups = yaml.safe_load((PROVISIONED / "alerting" / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    twins = {each["title"]: each for group in groups for each in group["rules"]}
    alerts = {each.name: each for each in RULES if each.alert}
    assert twins.keys() == alerts.keys()
    assert len({each["uid"] for each in twins.values()}) == len(twins)
    (source,) = yaml.safe_load((PROVISIONED / "datasources" / "prometheus.yml").read_text())["datasources"]
    for name, twin in twins.items():
        alert = alerts[name]
        query, condition = twin["data"]
        assert (query["datasourceUid"], condition["datasourceUid"]) == (source["uid"], "__expr__")
        assert query["model"]["expr"] == alert.expr
        assert query["model"]["instant"]
        assert (twin["condition"], condition["model"]["type"]) == (condition["refId"], "math")
        assert twin["for"] == alert.lasting
        assert twin["labels"] == alert.labels
        assert twin["labels"]["severity"] in {"page", "ticket", "info"}
        assert twin["noDataState"] == "OK", "an expression that finds nothing is how all is well"
        assert twin["annotations"].keys() == alert.annotations.keys()
        assert not any(re.search(r"\$value\b|\$\{", text) for text in twin["annotations"].values())
        assert len(twin["uid"]) <= 40
        assert unknown(alerting.Rule, twin) == set()
    assert all(int(group["interval"].removesuffix("s")) % 10 == 0 for group in groups), "Grafana's ticks"


def test_grafana_tells_one_place_that_the_environment_names_of_all_severities() -> None:
    told = yaml.safe_load((PROVISIONED / "alerting" / "notifications.yaml").read_text(encoding="utf-8"))
    (contact,) = told["contactPoints"]
    assert contact["receivers"][0]["settings"]["url"] == "$KVGATE_ALERT_WEBHOOK_URL"
    assert [unknown(alerting.ContactPoint, each) for each in contact["receivers"]] == [set()]
    (policy,) = told["policies"]
    assert unknown(alerting.NotificationPolicy, policy) == {"orgId"}, "whose it is stands in the file alone"
    assert {each["receiver"] for each in (policy, *policy["routes"])} == {contact["name"]}
    severities = {each["object_matchers"][0][2] for each in policy["routes"]}
    assert severities == {each.labels["severity"] for each in RULES if each.alert}


def test_every_alert_is_explained_and_tested() -> None:
    alerts = [each.name for each in RULES if each.alert]
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = {line.lstrip("# ") for line in page.splitlines() if re.match("#{2,} ", line)}
    assert [name for name in alerts if name not in sections] == []
    cases = (ROOT / "dashboards" / "prometheus" / "rules_test.yml").read_text(encoding="utf-8")
    assert [name for name in alerts if f"`{name}`" not in page] == []
    assert [name for name in alerts if cases.count(f"alertname: {name}\n") < 2] == []
