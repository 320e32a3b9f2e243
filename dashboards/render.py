"""From our dashboards to Grafana's JSON, with the Grafana Foundation SDK."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    DataSourceRef,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.panel import Board, Look, Panel, Query

GRAFANA: Final = "13.2.3"
"""The version whose JSON this is; docker-compose.yml runs it."""

_HEIGHT: Final = {Look.NUMBER: 4}
_DATA: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")


def render(board: Board) -> str:
    """Return one dashboard as the text of its file."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(["kvgate"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("15s")
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("kvgate")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["kvgate"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    if board.by_instance:
        made.with_variable(_instances(several=board.uid != "kvgate-instance"))
    ids = count(1)
    for row in board.rows:
        made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made.with_panel(_panel(panel).id(next(ids)))
    board_json = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    for variable in board_json["templating"]["list"]:  # the SDK's model of variables has those of intervals in all
        for name in ("auto", "auto_count", "auto_min"):
            variable.pop(name, None)
    return json.dumps(board_json, indent=2, sort_keys=True) + "\n"


def _instances(*, several: bool) -> dashboard.QueryVariable:
    variable = (
        dashboard.QueryVariable("instance")
        .label("Instance")
        .datasource(_DATA)
        .query("label_values(kvgate_engine_up, instance)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
    return variable.multi(True).include_all(True).all_value(".*") if several else variable


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    made: timeseries.Panel | stat.Panel | heatmap.Panel
    match panel.look:
        case Look.NUMBER:
            made = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        case Look.HEATMAP:
            made = heatmap.Panel()
        case _:
            made = _lines(panel)
    made.title(panel.title).description(panel.about).datasource(_DATA).unit(panel.unit).no_value(panel.empty)
    made.span(panel.width).height(_HEIGHT.get(panel.look, 8))
    for target in _targets(panel.queries, panel.look):
        made.with_target(target)
    return made


def _lines(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(25 if panel.look is Look.STACKED else 8)
        .show_points(VisibilityMode.NEVER)
        .axis_soft_min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.look is Look.STACKED:
        made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made


def _targets(queries: Sequence[Query], look: Look) -> list[prometheus.Dataquery]:
    made = []
    for place, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + place))
        target.format(PromQueryFormat.HEATMAP if look is Look.HEATMAP else PromQueryFormat.TIME_SERIES)
        target.instant() if look is Look.NUMBER else target.range()
        target.exemplar("_bucket" in query.expr and look is Look.LINES)
        made.append(target)
    return made
