"""The traffic of the last minutes, in intervals."""

from gateway.telemetry.record import Outcome, RequestRecord
from gateway.telemetry.traffic import Traffic, quantile
from gateway.types import Operation, RequestId, Usage


def record(*, first_byte_s: float | None = None, stream: bool = True, usage: Usage | None = None) -> RequestRecord:
    return RequestRecord(
        operation=Operation.CHAT,
        request_id=RequestId("r"),
        started_s=10.0,
        stream=stream,
        status=200,
        first_byte_s=first_byte_s,
        usage=usage,
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_interval_has_what_ended_in_it_and_the_next_one_begins_empty() -> None:
    clock = Clock()
    traffic = Traffic(clock=clock, wall=lambda: 1000.0)
    used = Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=60)
    unknown = Usage(prompt_tokens=50, completion_tokens=3, cached_tokens=None)
    traffic.settled(record(first_byte_s=10.5, usage=used), Outcome.OK)
    traffic.settled(record(first_byte_s=12.0, usage=unknown), Outcome.OK)
    traffic.settled(record(first_byte_s=19.0, stream=False), Outcome.OK)
    traffic.settled(record(), Outcome.SHED)
    clock.now_s = 2.5
    interval = traffic.close(in_flight=3, waiting=1)
    assert (interval.number, interval.at_s, interval.span_s) == (1, 1000.0, 2.5)
    assert interval.outcomes == {Outcome.OK: 3, Outcome.SHED: 1}
    assert (interval.ttft_p50_s, interval.ttft_p99_s) == (0.5, 2.0), "of streams alone"
    assert (interval.prompt_tokens, interval.completion_tokens) == (150, 10)
    assert (interval.known_tokens, interval.cached_tokens) == (100, 60), "of answers that say what was cached"
    assert (interval.in_flight, interval.waiting) == (3, 1)
    clock.now_s = 4.5
    after = traffic.close(in_flight=0, waiting=0)
    assert (after.number, after.span_s, after.outcomes, after.ttft_p50_s, after.prompt_tokens) == (2, 2.0, {}, None, 0)


def test_only_the_latest_are_kept_and_only_new_ones_are_told_again() -> None:
    traffic = Traffic(kept=3)
    for _ in range(5):
        traffic.close(in_flight=0, waiting=0)
    assert [each.number for each in traffic.since(0)] == [3, 4, 5]
    assert [each.number for each in traffic.since(4, traffic.process)] == [5]
    assert traffic.since(5) == ()


def test_the_number_of_another_process_leads_to_all_that_is_kept() -> None:
    traffic = Traffic()
    traffic.close(in_flight=0, waiting=0)
    assert [each.number for each in traffic.since(77, "another")] == [1]


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([], 0.5) is None
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([float(each) for each in range(1, 101)], 0.99) == 99.0
