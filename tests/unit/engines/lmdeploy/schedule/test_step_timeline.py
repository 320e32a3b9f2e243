"""The timeline of steps: what the device did, why it was idle, and who waited."""

import pytest

from engines.lmdeploy.schedule.step_timeline import OpenStep, SentStep, StepTimeline
from kvcontrol.core.steps import KEPT_STEPS, STEP_SECONDS, Step, StepClock, StepsQuery, pauses


class Device:
    """A device in virtual time that is ``behind`` the host: what it was given last ends so much later."""

    def __init__(self, kind: StepClock = "cuda_events") -> None:
        self.kind: StepClock = kind
        self.now_s = 100.0
        self.passed_s = float("inf")
        self.freed: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def now(self, stream: object = None) -> float:
        del stream
        return self.now_s

    def is_past(self, moment: float) -> bool:
        return moment <= self.passed_s

    def between_s(self, earlier: float, later: float) -> float:
        return later - earlier

    def free(self, moment: float) -> None:
        self.freed.append(moment)


def sent(
    kind: str = "decode", *, sequences: int = 2, answering: int = 2, waiting: int = 0, tokens: int = 2
) -> SentStep:
    return SentStep(
        kind=kind,  # type: ignore[arg-type]
        reason="because",
        sequences=sequences,
        tokens=tokens,
        history_tokens=10,
        pairs=20.0,
        answering=answering,
        waiting=waiting,
        sent_s=100.0,
    )


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timeline(device: Device) -> StepTimeline:
    return StepTimeline(device, clock=device.clock)


def run(timeline: StepTimeline, device: Device, step: SentStep, *, host_s: float = 0.0, device_s: float = 1.0) -> None:
    timeline.sent(step)
    device.now_s += host_s
    timeline.take(is_decode=step.kind == "decode")
    timeline.begin()
    device.now_s += device_s
    timeline.end()


def steps(timeline: StepTimeline, **query: int) -> list[Step]:
    return timeline.report(StepsQuery(**query)).steps


def test_a_step_has_its_time_on_the_device_and_the_hosts_time_before_it(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent("prefill", sequences=1, tokens=50), device_s=3.0)
    run(timeline, device, sent(), host_s=0.5, device_s=2.0)
    first, second = steps(timeline)
    assert (first.number, first.kind, first.device_s, first.idle_s) == (1, "prefill", 3.0, 0.0)
    assert (second.number, second.kind, second.device_s, second.host_s) == (2, "decode", 2.0, 0.5)
    assert (second.no_work_s, second.kv_s, second.sequences, second.tokens, second.history_tokens) == (0, 0, 2, 2, 10)
    assert second.reason == "because"


@pytest.mark.parametrize("reason", ["no_work", "kv"])
def test_idle_time_in_which_the_engine_waits_has_its_reason(
    timeline: StepTimeline, device: Device, reason: str
) -> None:
    run(timeline, device, sent())
    with timeline.waiting(reason):  # type: ignore[arg-type]
        device.now_s += 4.0
    run(timeline, device, sent(), host_s=0.25)
    last = steps(timeline)[-1]
    assert (last.idle_s, getattr(last, f"{reason}_s"), last.host_s) == (4.25, 4.0, 0.25)


def test_idle_time_in_which_loads_are_polled_is_a_wait_for_kv(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent())
    timeline.idle_for("kv")
    run(timeline, device, sent(), host_s=0.5)
    run(timeline, device, sent(), host_s=0.5)
    assert [(step.kv_s, step.host_s) for step in steps(timeline)[1:]] == [(0.5, 0.0), (0.0, 0.5)]


def test_the_time_that_an_engine_slept_is_no_work(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent())
    timeline.idle_for("no_work")
    run(timeline, device, sent(), host_s=60.0)
    assert steps(timeline)[-1].no_work_s == 60.0


def test_a_step_is_reported_when_the_device_has_passed_its_end(timeline: StepTimeline, device: Device) -> None:
    device.passed_s = 0.0
    run(timeline, device, sent())
    run(timeline, device, sent(), host_s=0.5)
    assert steps(timeline) == []
    device.passed_s = 101.0
    timeline.settle()
    assert [step.number for step in steps(timeline)] == [1]
    device.passed_s = 200.0
    timeline.settle()
    assert [step.host_s for step in steps(timeline)] == [0.0, 0.5]


def test_running_answers_stand_still_for_steps_that_give_them_no_token(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent("chunk", sequences=1, answering=3, waiting=5), device_s=2.0)
    run(timeline, device, sent("decode", sequences=3, answering=3, waiting=5))
    report = timeline.report(StepsQuery())
    assert [(step.stalled, step.waiting) for step in report.steps] == [(3, 5), (0, 5)]
    assert (report.totals.stalled_s, report.totals.waited_s) == (6.0, 15.0)


def test_what_is_forgotten_or_fails_is_counted_and_leaves_no_gap(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent())
    timeline.sent(sent())
    timeline.forget()
    timeline.sent(sent("prefill"))
    timeline.take(is_decode=False)
    timeline.begin()
    timeline.fail()
    run(timeline, device, sent(), host_s=30.0)
    report = timeline.report(StepsQuery())
    assert (report.lost, [step.idle_s for step in report.steps]) == (2, [0.0, 0.0])


def test_a_step_that_nobody_sent_is_not_taken_for_another(timeline: StepTimeline, device: Device) -> None:
    timeline.sent(sent("prefill"))
    timeline.take(is_decode=True)
    timeline.begin()
    timeline.end()
    run(timeline, device, sent())
    report = timeline.report(StepsQuery())
    assert (report.lost, [step.kind for step in report.steps]) == (1, ["decode"])


def test_a_model_in_other_processes_is_timed_from_sending_to_the_tokens() -> None:
    device = Device("round_trip")
    timeline = StepTimeline(device, clock=device.clock)
    assert timeline.is_round_trip
    timeline.sent(sent("prefill"))  # at 100
    timeline.sent(sent())
    device.now_s = 102.0
    timeline.arrived(is_decode=False)
    device.now_s = 103.0
    timeline.arrived(is_decode=True)
    report = timeline.report(StepsQuery())
    assert (report.clock, [step.device_s for step in report.steps]) == ("round_trip", [2.0, 1.0])


def test_the_last_steps_and_those_after_a_number_are_given(timeline: StepTimeline, device: Device) -> None:
    for _ in range(10):
        run(timeline, device, sent())
    assert [step.number for step in steps(timeline, last=3)] == [8, 9, 10]
    assert [step.number for step in steps(timeline, after=7)] == [8, 9, 10]
    assert [step.number for step in steps(timeline, last=2, after=5)] == [9, 10]
    assert steps(timeline, last=0) == []


def test_many_steps_leave_the_last_ones_and_the_sums_of_all(timeline: StepTimeline, device: Device) -> None:
    for _ in range(KEPT_STEPS + 5):
        run(timeline, device, sent(), device_s=0.5)
    report = timeline.report(StepsQuery(last=KEPT_STEPS))
    assert (len(report.steps), report.steps[0].number, report.totals.steps["decode"]) == (KEPT_STEPS, 6, KEPT_STEPS + 5)
    counts = timeline.counts()
    assert counts.totals == report.totals
    assert sum(counts.histograms.seconds["decode"]) == KEPT_STEPS + 5
    assert counts.histograms.seconds["decode"][STEP_SECONDS.index(0.5)] == KEPT_STEPS + 5
    assert counts.histograms.sequences_sum["decode"] == 2 * (KEPT_STEPS + 5)


def test_an_engine_that_takes_nothing_keeps_few_of_what_is_sent(timeline: StepTimeline, device: Device) -> None:
    for _ in range(1_000):
        timeline.sent(sent("prefill"))
    timeline.forget()
    run(timeline, device, sent())
    assert (timeline.report(StepsQuery()).lost, len(steps(timeline))) == (1_000, 1)


def test_whoever_watches_gets_each_step_as_it_was_sent_and_measured(timeline: StepTimeline, device: Device) -> None:
    seen: list[tuple[SentStep, Step]] = []
    timeline.measured = lambda step, done: seen.append((step, done))
    run(timeline, device, step := sent())
    [(sent_step, done)] = seen
    assert (sent_step, done.device_s) == (step, 1.0)


def begin_chunk(timeline: StepTimeline, tokens: int = 50) -> OpenStep | None:
    timeline.sent(sent("overlapped", sequences=1, tokens=tokens))
    timeline.take(is_decode=False)
    return timeline.begin_overlapped("second stream")


def test_the_device_is_not_idle_between_steps_while_a_chunk_overlaps(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent())
    device.now_s += 0.5  # the host chooses the chunk
    chunk = begin_chunk(timeline)
    device.now_s += 0.25
    run(timeline, device, sent(), device_s=2.0)
    device.now_s += 1.0  # the chunk alone
    timeline.end_overlapped(chunk, "second stream")
    device.now_s += 0.125  # nothing
    run(timeline, device, sent(), device_s=1.0)
    found = {step.kind: step for step in steps(timeline)}
    assert (found["overlapped"].device_s, found["overlapped"].idle_s, found["overlapped"].stalled) == (3.25, 0.0, 0)
    decodes = [step for step in steps(timeline) if step.kind == "decode"]
    assert [(step.host_s, step.overlapped_s) for step in decodes] == [(0.0, 0.0), (0.5, 0.25), (0.125, 1.0)]
    totals = timeline.report(StepsQuery()).totals
    assert totals.device_s["overlapped"] == 1.25
    assert totals.device_s["decode"] == 4.0
    assert sum(totals.device_s.values()) + sum(totals.idle_s.values()) == 5.875  # all of the time
    assert sum(totals.shares().values()) == pytest.approx(1.0)


def test_a_pause_of_answers_is_not_longer_for_a_chunk_beside_them(timeline: StepTimeline, device: Device) -> None:
    run(timeline, device, sent())
    chunk = begin_chunk(timeline)
    run(timeline, device, sent(), device_s=1.5)
    timeline.end_overlapped(chunk, "second stream")
    run(timeline, device, sent(), device_s=1.0)
    assert pauses(steps(timeline)) == [1.5, 1.0]


def test_overlapping_chunks_give_back_their_moments(timeline: StepTimeline, device: Device) -> None:
    for _ in range(5):
        chunk = begin_chunk(timeline)
        run(timeline, device, sent())
        timeline.end_overlapped(chunk, "second stream")
    run(timeline, device, sent())
    assert len(device.freed) == 2 * 5 + 2 * 6 - 1  # all but the end of the last step
