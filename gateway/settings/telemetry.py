"""Traces and log lines."""

from typing import Literal

from pydantic import Field

from gateway.settings.section import Section


class TelemetrySettings(Section):
    """Traces and log lines."""

    otlp_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over HTTP, like http://127.0.0.1:4318) that is sent a trace of each "
        "request; or OTEL_EXPORTER_OTLP_ENDPOINT. Without one there are none.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines that are written."
    )
