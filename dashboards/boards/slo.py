"""Objectives: how many requests may fail or be slow, how fast that is being used up, and what alarms."""

from typing import Final

from dashboards.panel import Board, Row, Shown, lines, number, query

_FAIR: Final = "nothing is wrong"

BOARD: Final = Board(
    uid="kvgate-slo",
    title="kvgate: objectives",
    about="99.9 % of requests are answered, 95 % have their first byte within 2.5 s. What counts is in docs/operations.md.",
    rows=(
        Row(
            title="Answered",
            panels=(
                number(
                    "Failed, last hour",
                    "Share of requests that failed on our side; the objective is at most 0.1 %.",
                    Shown.SHARE,
                    "kvgate:request_errors:ratio_rate1h",
                    width=6,
                ),
                number(
                    "Burn rate, last hour",
                    "1 uses up exactly what is allowed; 14.4 all of a month's in two days.",
                    Shown.TIMES,
                    "kvgate:request_errors:ratio_rate1h / 0.001",
                    width=6,
                ),
                lines(
                    "Share that failed",
                    "refused, upstream_error, deadline and gateway_error, of all but the client's own errors and those who left.",
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
                    "1 uses up exactly what is allowed.",
                    Shown.TIMES,
                    "kvgate:slow_first_bytes:ratio_rate1h / 0.05",
                    width=6,
                ),
                lines(
                    "Share that was slow",
                    "First byte after more than 2.5 s.",
                    Shown.SHARE,
                    query("kvgate:slow_first_bytes:ratio_rate5m", "5 min"),
                    query("kvgate:slow_first_bytes:ratio_rate30m", "30 min"),
                    query("kvgate:slow_first_bytes:ratio_rate1h", "1 h"),
                    query("kvgate:slow_first_bytes:ratio_rate6h", "6 h"),
                    width=12,
                ),
                lines(
                    "To the first byte, by operation",
                    "Percentiles that the rules record.",
                    Shown.SECONDS,
                    query("kvgate:first_byte_seconds:p50_rate5m", "p50 {{operation}}"),
                    query("kvgate:first_byte_seconds:p95_rate5m", "p95 {{operation}}"),
                    query("kvgate:first_byte_seconds:p99_rate5m", "p99 {{operation}}"),
                    width=12,
                ),
            ),
        ),
        Row(
            title="Alarms",
            panels=(
                lines(
                    "Alarms",
                    "1 for each that is pending or firing. What to do stands in docs/operations.md.",
                    Shown.STATE,
                    query('ALERTS{alertname=~"Kvgate.*"}', "{{alertname}} {{alertstate}} {{instance}}"),
                    width=24,
                    empty=_FAIR,
                ),
            ),
        ),
    ),
)
