"""Objectives: shares of failed and slow requests, burn rates, and alerts."""

from typing import Final

from dashboards.panel import Board, Row, Shown, lines, number, query

_FAIR: Final = "no alert is pending or firing"

BOARD: Final = Board(
    uid="kvgate-slo",
    title="kvgate: objectives",
    about="99.9 % of requests are answered; 95 % have their first byte within 2.5 s. docs/operations.md defines both.",
    rows=(
        Row(
            title="Answered",
            panels=(
                number(
                    "Failed, last hour",
                    "Share of requests that failed on the server side; the objective is at most 0.1 %.",
                    Shown.SHARE,
                    "kvgate:request_errors:ratio_rate1h",
                    width=6,
                ),
                number(
                    "Burn rate, last hour",
                    "1 uses up exactly the error budget; 14.4 uses up a month's budget in two days.",
                    Shown.TIMES,
                    "kvgate:request_errors:ratio_rate1h / 0.001",
                    width=6,
                ),
                lines(
                    "Share of failed requests",
                    "refused, upstream_error, deadline and gateway_error, as a share of requests without client errors and disconnects.",
                    Shown.SHARE,
                    query("kvgate:request_errors:ratio_rate5m", "5 min"),
                    query("kvgate:request_errors:ratio_rate30m", "30 min"),
                    query("kvgate:request_errors:ratio_rate1h", "1 h"),
                    query("kvgate:request_errors:ratio_rate6h", "6 h"),
                    width=12,
                ),
            ),
        ),
        Row(
            title="In time",
            panels=(
                number(
                    "Slow, last hour",
                    "Share of requests whose first byte took more than 2.5 s; the objective is at most 5 %.",
                    Shown.SHARE,
                    "kvgate:slow_first_bytes:ratio_rate1h",
                    width=6,
                ),
                number(
                    "Burn rate, last hour",
                    "1 uses up exactly the budget of slow requests.",
                    Shown.TIMES,
                    "kvgate:slow_first_bytes:ratio_rate1h / 0.05",
                    width=6,
                ),
                lines(
                    "Share of slow requests",
                    "Requests whose first byte took more than 2.5 s.",
                    Shown.SHARE,
                    query("kvgate:slow_first_bytes:ratio_rate5m", "5 min"),
                    query("kvgate:slow_first_bytes:ratio_rate30m", "30 min"),
                    query("kvgate:slow_first_bytes:ratio_rate1h", "1 h"),
                    query("kvgate:slow_first_bytes:ratio_rate6h", "6 h"),
                    width=12,
                ),
                lines(
                    "Time to first byte, by operation",
                    "Percentiles from the recording rules.",
                    Shown.SECONDS,
                    query("kvgate:first_byte_seconds:p50_rate5m", "p50 {{operation}}"),
                    query("kvgate:first_byte_seconds:p95_rate5m", "p95 {{operation}}"),
                    query("kvgate:first_byte_seconds:p99_rate5m", "p99 {{operation}}"),
                    width=12,
                ),
            ),
        ),
        Row(
            title="Alerts",
            panels=(
                lines(
                    "Alerts",
                    "1 for each pending or firing alert. docs/operations.md has the runbook.",
                    Shown.STATE,
                    query('ALERTS{alertname=~"Kvgate.*"}', "{{alertname}} {{alertstate}} {{instance}}"),
                    width=24,
                    empty=_FAIR,
                ),
            ),
        ),
    ),
)
