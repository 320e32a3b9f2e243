"""What steps of an engine sum up to."""

import pytest

from kvcontrol.core.steps import Step, StepKind, StepTotals, pauses, spread, summarize


def step(kind: StepKind, device_s: float, *, stalled: int = 0, **idle: float) -> Step:
    return Step(
        number=1,
        began_s=0.0,
        kind=kind,
        reason="",
        sequences=1,
        tokens=4,
        history_tokens=0,
        device_s=device_s,
        launch_s=0.0,
        no_work_s=idle.get("no_work", 0.0),
        kv_s=idle.get("kv", 0.0),
        host_s=idle.get("host", 0.0),
        stalled=stalled,
        waiting=0,
    )


def test_shares_of_the_time_sum_up_to_one() -> None:
    summary = summarize(
        [step("prefill", 2.0), step("decode", 1.0, host=0.5, kv=0.25), step("decode", 1.0, no_work=0.25)]
    )
    assert summary.span_s == 5.0
    assert summary.shares == {
        "prefill": 0.4,
        "chunk": 0.0,
        "overlapped": 0.0,
        "decode": 0.4,
        "other": 0.0,
        "idle_no_work": 0.05,
        "idle_kv": 0.05,
        "idle_host": 0.1,
    }
    assert sum(summary.shares.values()) == pytest.approx(1)


def test_nothing_measured_has_no_shares() -> None:
    summary = summarize([])
    assert (set(summary.shares.values()), summary.pause.count, summary.decode.max_s) == ({0.0}, 0, 0.0)


def test_a_pause_is_from_one_decode_step_to_the_next_while_answers_run() -> None:
    found = pauses(
        [
            step("decode", 1.0),
            step("decode", 1.0, host=0.5),  # 1.5
            step("chunk", 3.0, stalled=2),
            step("prefill", 2.0, stalled=2),
            step("decode", 1.0, host=0.5),  # 6.5
            step("prefill", 9.0, stalled=0),  # nobody waits: the answers had ended
            step("decode", 1.0),
            step("decode", 1.0, no_work=7.0),  # another answer
            step("decode", 1.0),  # 1.0
        ]
    )
    assert found == [1.5, 6.5, 1.0]


def test_sums_of_two_times_or_instances_are_added_and_subtracted() -> None:
    first, both, second = StepTotals(), StepTotals(), StepTotals()
    early, late = step("decode", 1.0, host=0.5, stalled=1), step("chunk", 2.0, kv=0.25, stalled=3)
    first.add(early)
    second.add(late)
    both.add(early)
    both.add(late)
    assert both.minus(first) == second
    assert first.plus(second) == both
    assert (second.steps["chunk"], second.tokens["chunk"], second.stalled_s) == (1, 4, 6.0)


def test_percentiles_are_values_that_occurred() -> None:
    found = spread([float(each) for each in range(1, 101)])
    assert (found.count, found.mean_s, found.p50_s, found.p99_s, found.max_s) == (100, 50.5, 50.0, 99.0, 100.0)
