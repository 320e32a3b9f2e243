"""What ``kvgate bench served`` makes of answers, and what it refuses."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from kvcontrol.core.steps import StepTotals
from kvgate.engine.model import Model
from kvgate.failure import CommandError
from lab.bench.served.run import Seen, ServedPlan, figures_of, report_of, run, small_trace
from lab.bench.served.subjects import Peer, Pool, Served
from lab.driver.answer import Answer, Ending
from lab.driver.run import Replayed
from lab.driver.summary import Setting, summarize
from lab.traces import read_requests


def answer(number: int, *, first_s: float, gaps: list[float], tokens: int) -> Answer:
    last_s = first_s + sum(gaps)
    return Answer(
        number=number,
        due_s=0.0,
        sent_s=0.001,
        first_s=first_s,
        last_s=last_s,
        ended_s=last_s,
        gaps_s=array("f", gaps),
        ending=Ending.OK,
        prompt_tokens=100,
        planned_tokens=100,
        reusable_tokens=80,
        cached_tokens=40,
        completion_tokens=tokens,
    )


def seen(name: str, answers: list[Answer], steps: StepTotals | None = None) -> Seen:
    setting = Setting(
        how="", block_tokens=16, elapsed_s=2.0, planned=9, left_out=0, open_loop=False, driver_cpu_s=0.1, tier_tokens={}
    )
    replayed = Replayed(report=summarize(answers, setting), answers=answers, setting=setting, interrupted=False)
    served = Served(name=name, url="http://127.0.0.1:1", fleet_url=None, ready_s=3.0)
    return Seen(served=served, replayed=replayed, warm_up_s=1.5, steps=steps)


def plan(tmp_path: Path, *subjects: str) -> ServedPlan:
    return ServedPlan(
        model=Model(folder=tmp_path, name="m"),
        trace=tmp_path / "trace.jsonl",
        users=2,
        duration_s=1.0,
        limit=9,
        pool=Pool(kv_blocks=16, max_batch_size=4, ddr=None),
        subjects=subjects,
        peers=(),
        up_options=(),
        seed=0,
    )


def test_time_per_token_counts_tokens_where_time_between_events_counts_events() -> None:
    figures = figures_of(seen("ours", [answer(1, first_s=0.5, gaps=[0.25, 0.25], tokens=6)]))
    assert figures["tpot_mean_ms"] == pytest.approx(100)  # 0.5 s for five tokens
    assert figures["itl_mean_ms"] == figures["itl_max_ms"] == pytest.approx(250)
    assert figures["events_per_token_ratio"] == pytest.approx(0.5)
    assert figures["ttft_p50_ms"] == pytest.approx(500)
    assert (figures["cached_ratio"], figures["ceiling_ratio"]) == (0.4, 0.8)
    assert (figures["ready_s"], figures["warm_up_s"]) == (3.0, 1.5)


def test_a_request_that_ends_after_the_last_one_was_sent_counts_by_the_share_of_its_time_before() -> None:
    early, late = (answer(number, first_s=0.5, gaps=[0.5], tokens=10) for number in (1, 2))
    late.due_s, late.first_s, late.ended_s = 1.5, 3.0, 5.5
    last = answer(3, first_s=0.5, gaps=[0.5], tokens=10)
    last.due_s, last.first_s, last.ended_s = 2.5, 3.0, 4.5
    figures = figures_of(seen("ours", [early, late, last]))
    assert figures["requests_per_s"] == pytest.approx((1 + 0.25) / 2.5)
    assert figures["output_tokens_per_s"] == pytest.approx((10 + 2.5) / 2.5)


def test_the_report_sets_ours_beside_every_other_and_tells_of_engines_with_few_events(tmp_path: Path) -> None:
    ours = [answer(1, first_s=0.5, gaps=[0.1] * 4, tokens=5), answer(2, first_s=0.5, gaps=[0.1] * 4, tokens=5)]
    other = [answer(1, first_s=1.0, gaps=[0.4], tokens=5)]
    totals = StepTotals()
    totals.device_s["decode"], totals.idle_s["host"] = 3.0, 1.0
    report = report_of(
        plan(tmp_path, "ours"),
        [seen("ours", ours, totals), seen("stock", other), seen("vllm", other)],
        {"sglang": "away"},
    )
    assert report.metrics["ours_over_stock_requests_ratio"] == pytest.approx(2.0)
    assert report.metrics["ours_over_vllm_ttft_mean_ratio"] == pytest.approx(0.5)
    assert report.metrics["ours_itl_p99_ms"] == pytest.approx(100)
    assert report.metrics["stock_itl_p99_ms"] == pytest.approx(400)
    assert report.metrics["device_idle_pct"] == pytest.approx(25.0)
    assert report.grids[0].columns == ("figure", "ours", "stock", "vllm")
    assert report.not_run.keys() == {"ITL of stock", "ITL of vllm", "sglang"}


@pytest.mark.parametrize(
    "text", ["vllm", "=http://127.0.0.1", "vllm=127.0.0.1:1", "ours=http://127.0.0.1:1", "a b=http://x"]
)
def test_a_peer_is_a_name_and_an_address(text: str) -> None:
    with pytest.raises(CommandError, match="NAME=URL is allowed"):
        Peer.parse(text)


def test_an_unknown_subject_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="theirs: allowed are ours, stock"):
        run(plan(tmp_path, "ours", "theirs"), print)


def test_stock_lmdeploy_is_refused_beside_a_fleet_before_anything_starts(tmp_path: Path) -> None:
    fleet = replace(plan(tmp_path, "ours", "stock"), pool=Pool(kv_blocks=16, max_batch_size=4, ddr=None, instances=2))
    with pytest.raises(CommandError, match="--instances 2: stock LMDeploy is one server"):
        run(fleet, print)


def test_the_small_trace_is_of_sessions_whose_prompts_grow(tmp_path: Path) -> None:
    requests = read_requests(small_trace(tmp_path))
    assert len(requests) == 30
    first = [each for each in requests if each.session == requests[0].session]
    assert [len(each.block_ids) for each in first] == [2, 3, 4, 5, 6]
