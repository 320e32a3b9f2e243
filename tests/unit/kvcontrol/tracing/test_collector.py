import pytest

from kvcontrol.tracing import Collector, TracingError, collector_of

AT = "http://collector:4318"


def found(endpoint: str | None = None, **environment: str) -> Collector | None:
    return collector_of(endpoint, setting="KVGATE_OTLP_ENDPOINT", environment=environment)


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        (AT, {}, f"{AT}/v1/traces"),
        (f"{AT}/", {}, f"{AT}/v1/traces"),
        (f"{AT}/v1/traces", {}, f"{AT}/v1/traces"),
        (AT, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:1"}, f"{AT}/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://other/otlp"}, "https://other/otlp/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:1/in"}, "http://other:1/in"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": AT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:1/in"},
            "http://other:1/in",
        ),
    ],
)
def test_a_collector_is_named_by_our_setting_or_by_the_standard_variables(
    endpoint: str | None, environment: dict[str, str], url: str
) -> None:
    collector = found(endpoint, **environment)
    assert collector is not None
    assert collector.url == url


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": AT, "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": AT, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": AT},
    ],
)
def test_traces_are_off_where_nothing_names_a_collector_or_the_standard_says_so(environment: dict[str, str]) -> None:
    assert found(**environment) is None


def test_how_much_may_wait_and_how_long_an_export_may_take_is_said_by_the_standard_variables() -> None:
    collector = found(
        AT,
        OTEL_BSP_MAX_QUEUE_SIZE="64",
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="8",
        OTEL_BSP_SCHEDULE_DELAY="250",
        OTEL_EXPORTER_OTLP_TIMEOUT="3",
    )
    assert collector == Collector(url=f"{AT}/v1/traces", queue_spans=64, batch_spans=8, pause_s=0.25, timeout_s=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:99999"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://host:4317"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
    ],
)
def test_what_would_not_work_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(TracingError, match=rf"^{name}={value!r}|{name}={value}"):
        found(**{"OTEL_EXPORTER_OTLP_ENDPOINT": AT, name: value})


@pytest.mark.parametrize("ratio", ["2", "-0.1", "half", "nan"])
def test_a_share_of_traces_is_from_0_to_1(ratio: str) -> None:
    with pytest.raises(TracingError, match=rf"OTEL_TRACES_SAMPLER_ARG='{ratio}'"):
        found(AT, OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG=ratio)
