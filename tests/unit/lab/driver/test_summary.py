"""Figures of a run: by hit class, from when a request was due, with every request counted somewhere."""

import json
from array import array
from pathlib import Path

import pytest

from lab.driver.answer import Answer, Ending, HitClass
from lab.driver.summary import Goals, Price, Setting, quantile, summarize, warnings


def whole(number: int, ttft_s: float, cached: int, *, late_s: float = 0.0, prompt: int = 100) -> Answer:
    due_s = float(number)
    first_s = due_s + ttft_s
    return Answer(
        number=number,
        due_s=due_s,
        sent_s=due_s + late_s,
        first_s=first_s,
        last_s=first_s + 0.2,
        ended_s=first_s + 0.25,
        gaps_s=array("f", [0.1, 0.1]),
        ending=Ending.OK,
        planned_tokens=100,
        reusable_tokens=96,
        prompt_tokens=prompt,
        completion_tokens=3,
        cached_tokens=cached,
        matched_tokens=cached,
        instance="a",
    )


def failed(ending: Ending, why: str) -> Answer:
    return Answer(number=9, due_s=9.0, sent_s=9.0, ended_s=9.1, ending=ending, why=why, instance="b")


def setting(**changed: object) -> Setting:
    values: dict[str, object] = {
        "how": "a test",
        "block_tokens": 16,
        "elapsed_s": 10.0,
        "planned": 6,
        "left_out": 0,
        "open_loop": True,
        "driver_cpu_s": 0.006,
    }
    return Setting(**values | changed)  # type: ignore[arg-type]


ANSWERS = [
    whole(0, 0.4, 0),
    whole(1, 0.3, 48),
    whole(2, 0.1, 96, late_s=0.02),
    failed(Ending.SHED, "429 saturated"),
    failed(Ending.FAILED, "stream cut off"),
    failed(Ending.INTERRUPTED, ""),
]


@pytest.mark.parametrize(
    ("cached", "kind"), [(0, HitClass.MISS), (1, HitClass.PARTIAL), (83, HitClass.PARTIAL), (84, HitClass.FULL)]
)
def test_a_prompt_is_a_full_hit_when_a_block_at_most_is_left(cached: int, kind: HitClass) -> None:
    assert HitClass.of(prompt_tokens=100, cached_tokens=cached, block_tokens=16) is kind


def test_every_request_is_counted_once_and_shares_are_of_those_that_were_not_interrupted() -> None:
    metrics = summarize(ANSWERS, setting()).metrics
    assert (metrics["requests_sent_count"], metrics["requests_ok_count"]) == (6, 3)
    assert metrics["requests_interrupted_count"] == 1
    assert metrics["shed_ratio"] == metrics["failed_ratio"] == pytest.approx(0.2)
    assert metrics["cached_ratio"] == pytest.approx(144 / 300)
    assert metrics["cached_of_ceiling_ratio"] == pytest.approx(144 / 288)
    assert metrics["requests_per_s"] == pytest.approx(0.3)
    assert metrics["driver_cpu_s_per_request"] == pytest.approx(0.001)


def test_latencies_stand_by_class_and_count_from_when_a_request_was_due() -> None:
    report = summarize(ANSWERS, setting())
    rows = {(row[0], row[1]): row for row in report.grids[0].rows}
    assert rows["ttft_ms", "all"][4] == pytest.approx(300)
    assert rows["ttft_ms", "full"][4] == pytest.approx(100), "0.02 s of it were the driver's own lateness"
    assert rows["itl_ms", "miss"][4] == pytest.approx(100)
    assert rows["e2e_ms", "partial"][4] == pytest.approx(550)
    assert report.metrics["driver_lag_p99_s"] == pytest.approx(0.02)
    assert [row[:2] for row in report.grids[1].rows] == [("miss", 1), ("partial", 1), ("full", 1)]


def test_goals_are_kept_by_whole_answers_alone() -> None:
    metrics = summarize(ANSWERS, setting(goals=Goals(ttft_s=0.35, itl_s=0.2))).metrics
    assert metrics["slo_ttft_attained_ratio"] == pytest.approx(2 / 5)
    assert metrics["slo_itl_attained_ratio"] == pytest.approx(3 / 5)
    assert metrics["slo_attained_ratio"] == pytest.approx(2 / 5)
    assert metrics["goodput_requests_per_s"] == pytest.approx(0.2)
    assert "slo_attained_ratio" not in summarize(ANSWERS, setting()).metrics


def test_a_run_costs_its_time_on_all_instances() -> None:
    metrics = summarize(ANSWERS, setting(price=Price(usd_per_hour=3.6, instances=2))).metrics
    assert metrics["cost_usd"] == pytest.approx(0.02)
    assert metrics["cost_per_million_output_tokens_usd"] == pytest.approx(0.02 / 9 * 1e6)


def test_errors_instances_and_tiers_have_tables_of_their_own() -> None:
    said = json.loads(summarize(ANSWERS, setting(tier_tokens={"HBM": 144.0})).as_json())
    assert said["errors"] == [
        {"ending": "shed", "why": "429 saturated", "requests": 1},
        {"ending": "failed", "why": "stream cut off", "requests": 1},
    ]
    assert [row["instance"] for row in said["instances"]] == ["a", "b"]
    assert said["tiers"] == [{"tier": "hbm", "matched_tokens": 144}]


def test_a_run_of_nothing_has_a_report_too() -> None:
    assert summarize([], setting()).metrics["requests_sent_count"] == 0


def test_what_spoils_the_figures_is_said() -> None:
    assert not list(warnings(ANSWERS, setting()))
    late = [whole(number, 0.3, 0, late_s=0.2, prompt=101) for number in range(3)]
    said = list(warnings(late, setting()))
    assert "more than 200 ms late" in said[0]
    assert "3 of 3 prompts had another number of tokens" in said[1]


def test_an_event_before_the_first_token_is_said_however_long_answers_are() -> None:
    answers = [whole(number, 0.3, 0) for number in range(3)]
    for each in answers:
        each.gaps_s, each.completion_tokens = array("f", [0.01] * 128), 128
    (said,) = warnings(answers, setting())
    assert said.startswith("3 of 3 answers have one event more than tokens")
    answers[0].completion_tokens = answers[1].completion_tokens = 129
    assert not list(warnings(answers, setting()))


def test_events_that_are_no_tokens_and_answers_shorter_than_asked_for_are_said() -> None:
    answers = [whole(number, 0.3, 0) for number in range(4)]
    for each in answers:
        each.asked_tokens, each.completion_tokens = 16, 9
    answers[3].last_s = answers[3].first_s
    report = summarize(answers, setting())
    assert report.metrics["short_answers_count"] == 4
    assert report.metrics["answers_at_once_count"] == 1
    assert report.metrics["events_per_token_ratio"] == pytest.approx(1 / 3)
    rows = {(row[0], row[1]): row for row in report.grids[0].rows}
    assert rows["tpot_ms", "all"][3] == pytest.approx(25), "eight pauses in 200 ms; of the one at once nothing is known"
    assert rows["itl_ms", "all"][3] == pytest.approx(100)
    short, at_once, events = warnings(answers, setting())
    assert short.startswith("4 of 4 answers were shorter than asked for: 36 tokens of 64.")
    assert at_once.startswith("1 of 4 answers came whole, at one moment")
    assert events.startswith("the target sent 0.33 events for each token")


def test_quantiles_are_values_that_occurred() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]


def test_a_run_can_be_drawn_also_one_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    from lab.driver.picture import draw

    for name, answers in (("some", ANSWERS), ("none", [])):
        draw(answers, setting(goals=Goals(ttft_s=0.2)), file=tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
