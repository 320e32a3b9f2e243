"""Where spans go: an OTLP/HTTP collector, by our setting or by OpenTelemetry's standard variables.

Off unless one of them names a collector. What is wrong is said at the start: a collector that would silently get
nothing is worse than none.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kvcontrol.tracing.outlet import Tracing

_PATH: Final = "/v1/traces"
_SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
_MILLION: Final = 1_000_000
_QUEUE_SPANS: Final = 2048
_BATCH_SPANS: Final = 512
_PAUSE_MS: Final = 5000
_TIMEOUT_S: Final = 10


class TracingError(ValueError):
    """Tracing is asked for and can't be had; the message names the setting, its value and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """An OTLP/HTTP collector: ``url`` is that of its traces. At most ``queue_spans`` wait for it; one export has
    ``timeout_s``, and comes ``pause_s`` after the last one or when ``batch_spans`` are there.
    """

    url: str
    queue_spans: int = _QUEUE_SPANS
    batch_spans: int = _BATCH_SPANS
    pause_s: float = _PAUSE_MS / 1000
    timeout_s: float = _TIMEOUT_S


def collector_of(
    endpoint: str | None, *, setting: str, environment: Mapping[str, str] = os.environ
) -> Collector | None:
    """Return where spans go, None when tracing is off; ``endpoint`` is the value of ``setting``, and goes before the
    variables. Raises ``TracingError`` for what won't do, and where OpenTelemetry isn't installed.
    """
    given = {name: value.strip() for name, value in environment.items() if name.startswith("OTEL_")}
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if endpoint:
        name, base, path = setting, endpoint, _PATH
    elif given.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
        base, path = given[name], ""
    elif given.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        name = "OTEL_EXPORTER_OTLP_ENDPOINT"
        base, path = given[name], _PATH
    else:
        return None
    if not _has_exporter():
        raise TracingError(f"{name}={base!r}: tracing needs OpenTelemetry: install kvgate[tracing], or unset it")
    _check_exporter(given)
    _check_sampler(given)
    batch = _whole(given, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH_SPANS)
    queue = _whole(given, "OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE_SPANS)
    if batch > queue:
        raise TracingError(f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={batch}: at most OTEL_BSP_MAX_QUEUE_SIZE, which is {queue}")
    timeouts = [each for each in ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT") if each in given]
    return Collector(
        url=_url(name, base, path),
        queue_spans=queue,
        batch_spans=batch,
        pause_s=_whole(given, "OTEL_BSP_SCHEDULE_DELAY", _PAUSE_MS) / 1000,
        timeout_s=_whole(given, timeouts[0], _TIMEOUT_S) if timeouts else _TIMEOUT_S,
    )


def start_tracing(collector: Collector, *, service: str) -> "Tracing":
    """Return what makes spans of a service and sends them."""
    from kvcontrol.tracing.outlet import Tracing

    return Tracing(collector, service=service)


def _has_exporter() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def _url(name: str, base: str, path: str) -> str:
    try:
        parts = urlsplit(base)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise TracingError(f"{name}={base!r}: an OTLP/HTTP collector's address looks like http://127.0.0.1:4318")
    bare = base.rstrip("/")
    return base if not path or bare.endswith(path) else bare + path


def _check_exporter(given: Mapping[str, str]) -> None:
    exporter = given.get("OTEL_TRACES_EXPORTER", "")
    if exporter not in {"", "otlp"}:
        raise TracingError(f"OTEL_TRACES_EXPORTER={exporter!r}: allowed are otlp and none")
    for protocol in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if given.get(protocol, "") not in {"", "http/protobuf"}:
            raise TracingError(f"{protocol}={given[protocol]!r}: allowed is http/protobuf")


def _check_sampler(given: Mapping[str, str]) -> None:
    sampler = given.get("OTEL_TRACES_SAMPLER", "").lower()
    if sampler and sampler not in _SAMPLERS:
        raise TracingError(f"OTEL_TRACES_SAMPLER={sampler!r}: allowed are {', '.join(_SAMPLERS)}")
    if sampler.endswith("traceidratio"):
        ratio = given.get("OTEL_TRACES_SAMPLER_ARG", "1")
        try:
            fits = 0 <= float(ratio) <= 1
        except ValueError:
            fits = False
        if not fits:
            raise TracingError(f"OTEL_TRACES_SAMPLER_ARG={ratio!r}: the share of traces, from 0 to 1")


def _whole(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MILLION):
        raise TracingError(f"{name}={text!r}: a whole number from 1 to {_MILLION}")
    return int(text)
