"""``kvgate replay --url`` against a gateway that runs here: it reports hits of shared prefixes, and failures."""

import asyncio
import json
import os
import signal
import sys
from array import array
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.models.tiny import write_tokenizer
from gateway.fingerprint.tokenizer import load_tokenizer
from kvgate.failure import CommandError
from lab.driver.answer import Ending
from lab.driver.options import HttpReplay
from lab.driver.run import Replayed, drive
from lab.driver.summary import warnings
from lab.traces import Request
from tests.support.fleet import Fleet, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import Script
from tests.support.tokenized_fleet import encoding_engine, tokenized_fleet

BLOCK = 32
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("models") / "tiny-llama")


def requests(*prompts: Sequence[int], apart_s: float = 0.0) -> list[Request]:
    return [
        Request(
            block_ids=array("q", ids),
            block_tokens=BLOCK,
            prompt_tokens=BLOCK * len(ids) - 5,
            at_s=number * apart_s,
            output_tokens=4,
        )
        for number, ids in enumerate(prompts)
    ]


def options(fleet: Fleet, **more: Any) -> HttpReplay:
    return HttpReplay(**{"target": fleet.gateway.url, "users": 1, **more})


async def replayed(fleet: Fleet, prompts: list[Request], **more: Any) -> Replayed:
    async with asyncio.timeout(LIMIT_S):
        return await drive(Path("trace"), prompts, options(fleet, **more))


async def test_what_the_trace_shares_the_engines_find(tmp_path: Path, model: Path) -> None:
    prompts = requests([1, 2, 3], [9], [1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4], [7, 2])
    async with tokenized_fleet(tmp_path, model) as fleet:
        done = await replayed(fleet, prompts, gpu_hour_usd=3.0)
        asked = [said["messages"][0]["content"] for engine in fleet.engines.values() for said in engine.requests]
        said = [said for engine in fleet.engines.values() for said in engine.requests]
    assert len(set(asked)) == 5, "only the request that came again has the same text"
    assert all((each["max_tokens"], each["ignore_eos"]) == (4, True) for each in said)
    metrics = done.report.metrics
    assert metrics["requests_ok_count"] == 6
    assert metrics["prompts_as_planned_ratio"] == 1.0
    assert metrics["instances_count"] == 2
    assert not done.interrupted
    answers = sorted(done.answers, key=lambda each: each.number)
    for answer, blocks in zip(answers, (0, 0, 3, 2, 4, 0), strict=True):
        # All prompts begin with the template: an engine's block of it and of a few tokens more may be found besides.
        assert blocks * BLOCK - 16 <= answer.cached_tokens <= blocks * BLOCK + 16 + 16, answer
    tiers = next(grid for grid in done.report.grids if grid.name == "tiers")
    assert tiers.rows == (("hbm", sum(each.matched_tokens for each in answers)),)


async def test_an_open_loop_sends_when_it_is_due_however_slow_answers_are(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:
        for engine in fleet.engines.values():
            engine.default = Script(ttft_s=1.0)
        done = await replayed(fleet, requests(*([n] for n in range(20)), apart_s=0.01), users=None, speed=2.0)
    assert [each.due_s for each in sorted(done.answers, key=lambda each: each.number)] == pytest.approx(
        [0.005 * number for number in range(20)]
    )
    assert all(each.ok and each.ttft_s >= 1.0 for each in done.answers)
    assert done.report.metrics["elapsed_s"] < 10, "one after another they would take 20 s"


async def test_duration_and_limit_bound_what_is_sent(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:
        done = await replayed(fleet, requests([1], [2], [3], apart_s=1000.0), users=None, duration=0.5)
        assert [each.number for each in done.answers] == [0]
        assert done.report.metrics["requests_planned_count"] == 3


@pytest.mark.parametrize(
    ("script", "ending", "why"),
    [
        (Script(status=500), Ending.FAILED, "500"),
        (Script(status=429), Ending.SHED, "429"),
        (Script(die_after=2), Ending.FAILED, "error in the stream upstream_cut"),
        (Script(error_event=True), Ending.FAILED, "error in the stream"),
        (Script(stall_after=2), Ending.FAILED, "timeout"),
    ],
)
async def test_what_fails_is_counted_by_how(
    *, tmp_path: Path, model: Path, script: Script, ending: Ending, why: str
) -> None:
    async with tokenized_fleet(tmp_path, model, retry_budget_ratio=0.0) as fleet:
        for engine in fleet.engines.values():
            engine.default = script
        done = await replayed(fleet, requests([1]), timeout=2.0)
    (answer,) = done.answers
    assert answer.ending is ending
    assert answer.why.startswith(why), answer.why
    errors = next(grid for grid in done.report.grids if grid.name == "errors")
    assert errors.rows == ((str(ending), answer.why, 1),)


async def test_another_seed_is_a_cold_cache(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:

        async def found(seed: int, said: str) -> int:
            done = await replayed(fleet, requests([1, 2, 3, 4]), seed=seed)
            assert "".join(warnings(done.answers, done.setting)).count(": the target's wasn't empty") == bool(said)
            (answer,) = done.answers
            return answer.cached_tokens

        assert await found(1, "") == 0
        assert await found(1, "warm") > 3 * BLOCK
        assert await found(2, "") == 0


async def test_a_gateway_that_ends_in_the_middle_leaves_the_report(tmp_path: Path, model: Path) -> None:
    async with tokenized_fleet(tmp_path, model) as fleet:
        for engine in fleet.engines.values():
            engine.default = Script(ttft_s=0.2)
        run = asyncio.create_task(replayed(fleet, requests(*([n] for n in range(30)))))
        await eventually(lambda: fleet.requests >= 2, LIMIT_S)  # so the first one has its answer
    done = await run
    metrics = done.report.metrics
    assert metrics["requests_sent_count"] == 30
    assert 0 < metrics["requests_ok_count"] < 30
    assert metrics["failed_ratio"] == pytest.approx(1 - metrics["requests_ok_count"] / 30)
    assert set(done.report.not_run) == {"tiers"}
    assert any("the tiers' tokens are unknown" in said for said in warnings(done.answers, done.setting))


async def test_a_target_without_a_tokenizer_is_named_and_a_folder_can_stand_in(tmp_path: Path, model: Path) -> None:
    async with running_fleet(tmp_path, {"a": encoding_engine(load_tokenizer(model))}) as fleet:
        with pytest.raises(CommandError, match="/tokenize answers 404") as refused:
            await replayed(fleet, requests([1]))
        assert "--tokenizer DIR" in refused.value.advice
        done = await replayed(fleet, requests([1]), tokenizer=model)
        assert done.report.metrics["prompts_as_planned_ratio"] == 1.0
        with pytest.raises(CommandError, match="no such folder"):
            await replayed(fleet, requests([1]), tokenizer=tmp_path / "none")


async def test_a_target_that_isnt_there_is_said_to_be_that() -> None:
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:9.*"):
        await drive(Path("trace"), requests([1]), HttpReplay(target="http://127.0.0.1:9"))


async def test_ctrl_c_ends_it_with_a_report_of_what_was_done(tmp_path: Path, model: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": [n], "input_length": 400, "output_length": 4, "timestamp": 0} for n in range(9)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "report"
    async with tokenized_fleet(tmp_path / "state", model) as fleet:
        for engine in fleet.engines.values():
            engine.default = Script(ttft_s=2.0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvgate", "replay", str(trace), "--url", fleet.gateway.url),
            *("--users", "1", "--out", str(out), "--json", "--slo-ttft", "60"),
            env={**os.environ, "COLUMNS": "200"},
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            await eventually(lambda: fleet.requests >= 2, LIMIT_S)  # so the first one has its answer
            process.send_signal(signal.SIGINT)
            stdout, stderr = await asyncio.wait_for(process.communicate(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 130, stderr.decode()
    said = json.loads(stdout)
    metrics = said["metrics"]
    assert 1 <= metrics["requests_ok_count"] < 9
    assert metrics["requests_ok_count"] + metrics["requests_interrupted_count"] == metrics["requests_sent_count"]
    assert metrics["slo_attained_ratio"] == 1
    assert json.loads((out / "report.json").read_text()) == said
    assert "| figure | class |" in (out / "report.md").read_text()
