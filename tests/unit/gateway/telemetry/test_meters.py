"""Counters and histograms count what they are told, and say it in both formats of Prometheus."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gateway.telemetry.meters import CounterMeter, HistogramMeter
from kvcontrol.series import Kind, Series, Unit

BY_COLOUR = Series(name="paint_litres", kind=Kind.COUNTER, unit=Unit.COUNT, help="Paint.", labels=("colour", "shop"))
WAITS = Series(name="wait_seconds", kind=Kind.HISTOGRAM, unit=Unit.SECONDS, help="Waits.", buckets=(0.5, 1, 2))
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def exposed(meter: CounterMeter | HistogramMeter, accept: str = "") -> str:
    class One(Collector):
        def collect(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - the type is prometheus_client's
            yield meter.family()

    registry = CollectorRegistry()
    registry.register(One())
    return choose_encoder(accept)[0](registry).decode()


def test_a_counter_counts_by_its_labels_and_its_name_ends_in_total() -> None:
    meter = CounterMeter(BY_COLOUR)
    meter.inc("red", "north")
    meter.inc("red", "north", by=2.5)
    meter.begin("blue", "north")
    meter.begin("red", "north")
    text = exposed(meter)
    assert "# TYPE paint_litres_total counter" in text
    assert 'paint_litres_total{colour="red",shop="north"} 3.5' in text
    assert 'paint_litres_total{colour="blue",shop="north"} 0.0' in text


def test_a_counter_without_labels_is_there_from_the_start() -> None:
    plain = Series(name="jobs", kind=Kind.COUNTER, unit=Unit.COUNT, help="Jobs.")
    assert "jobs_total 0.0" in exposed(CounterMeter(plain))


def test_what_has_a_forgotten_value_is_gone_and_nothing_else() -> None:
    meter = CounterMeter(BY_COLOUR)
    for shop in ("north", "south"):
        meter.inc("red", shop)
        meter.inc("blue", shop)
    meter.forget("shop", "north")
    text = exposed(meter)
    assert "north" not in text
    assert text.count("south") == 2


def test_what_has_none_of_the_kept_values_is_gone() -> None:
    meter = CounterMeter(BY_COLOUR)
    for shop in ("north", "south", "west"):
        meter.inc("red", shop)
    meter.keep("shop", {"south", "nowhere"})
    text = exposed(meter)
    assert text.count("shop=") == 1
    assert 'shop="south"' in text


@pytest.mark.parametrize(("value", "bucket"), [(0.1, "0.5"), (0.5, "0.5"), (0.51, "1.0"), (2.0, "2.0"), (9.0, "+Inf")])
def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed(value: float, bucket: str) -> None:
    meter = HistogramMeter(WAITS)
    meter.observe(value)
    buckets = [line for line in exposed(meter).splitlines() if line.startswith("wait_seconds_bucket")]
    assert len(buckets) == 4
    first = next(line for line in buckets if line.endswith(" 1.0"))
    assert f'le="{bucket}"' in first


def test_a_histogram_is_cumulative_and_has_its_count_and_sum() -> None:
    meter = HistogramMeter(WAITS)
    for value in (0.25, 0.75, 0.75, 8):
        meter.observe(value)
    lines = exposed(meter).splitlines()
    assert [line.rpartition(" ")[2] for line in lines if "_bucket" in line] == ["1.0", "3.0", "3.0", "4.0"]
    assert "wait_seconds_count 4.0" in lines
    assert "wait_seconds_sum 9.75" in lines


def test_a_traced_value_is_its_buckets_example_in_openmetrics_alone() -> None:
    meter = HistogramMeter(WAITS)
    meter.observe(0.75, trace_id="0af7651916cd43dd8448eb211c80319c")
    meter.observe(0.25)
    assert "0af76" not in exposed(meter)
    families = list(text_string_to_metric_families(exposed(meter, OPENMETRICS)))
    examples = {
        sample.labels["le"]: sample.exemplar for family in families for sample in family.samples if sample.exemplar
    }
    assert list(examples) == ["1.0"]
    assert examples["1.0"].labels == {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    assert examples["1.0"].value == 0.75


def test_nothing_says_when_it_was_created() -> None:
    class Both(Collector):
        def collect(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
            counter = CounterMeter(BY_COLOUR)
            counter.inc("red", "north")
            yield counter.family()
            yield HistogramMeter(WAITS).family()

    registry = CollectorRegistry()
    registry.register(Both())
    assert "_created" not in generate_latest(registry).decode()
