"""A warm-up's prompts go through the whole engine and leave no trace in it."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.lmdeploy.agent import agent_of
from engines.lmdeploy.schedule.step_watch import timeline_of
from engines.lmdeploy.warm_start import warm, warm_up_s_of, waves
from tests.support.engine import LocalEngine, Sampling
from tests.support.instance import Instance
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

PROMPTS = [random_prompt(40 + seed, seed) for seed in range(3)]


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import (
        admission_hooks,
        event_hooks,
        eviction_hooks,
        host_hooks,
        pd_hooks,
        schedule_hooks,
        step_hooks,
        tenant_hooks,
    )
    from engines.lmdeploy.patching import install

    undo = install(
        [
            *(hook for hook in host_hooks() if "ZMQMPEngine" not in hook.target),
            *event_hooks(),
            *eviction_hooks(),
            *tenant_hooks(),
            *schedule_hooks(),
            *step_hooks(),
            *admission_hooks(),
            *pd_hooks(),
        ]
    )
    yield
    undo()


@pytest.fixture
def local(tiny_llama: Path) -> Iterator[LocalEngine]:
    with LocalEngine.start(tiny_llama, enable_prefix_caching=True, max_batch_size=8) as local:
        yield local


def test_every_prompt_is_answered_and_the_log_says_how_long_each_took(local: LocalEngine) -> None:
    lines: list[str] = []

    took_s = local.runner.run(warm(local.engine, lines.append))

    assert took_s is not None
    *steps, last = lines
    assert [line.partition(":")[0] for line in steps] == [
        "warm-up 1 of 7, a short prompt",
        "warm-up 2 of 7, the same, sampled",
        "warm-up 3 of 7, two chunks and a rest",
        "warm-up 4 of 7, most of it cached",
        "warm-up 5 of 7, 2 requests at once",
        "warm-up 6 of 7, 5 requests at once",
        "warm-up 7 of 7, structured output",
    ]
    assert last == f"warm after {took_s:.1f} s"


def test_structured_output_and_logprobs_are_computed_by_the_sampling_that_requests_use(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdeploy.pytorch.engine.guided_process import GuidedDecodingManager
    from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor

    masked: list[int] = []
    ranked: list[int] = []
    apply, compute = GuidedDecodingManager.apply_batched_bitmap, FusedLogitsProcessor.compute_logprobs

    def watched_apply(self: Any, logits: Any, bitmask: Any) -> None:
        masked.append(len(logits))
        apply(self, logits, bitmask)

    def watched_compute(self: Any, raw_logprobs: Any, token_ids: Any) -> Any:
        found = compute(self, raw_logprobs, token_ids)
        ranked.append(0 if found is None else len(token_ids))
        return found

    monkeypatch.setattr(GuidedDecodingManager, "apply_batched_bitmap", watched_apply)
    monkeypatch.setattr(FusedLogitsProcessor, "compute_logprobs", watched_compute)
    lines: list[str] = []
    with LocalEngine.start(tiny_llama, logprobs_mode="raw_logprobs", max_batch_size=8) as engine:
        assert engine.runner.run(warm(engine.engine, lines.append)) is not None
    assert [line.partition(":")[0] for line in lines[-3:-1]] == [
        "warm-up 7 of 8, structured output",
        "warm-up 8 of 8, log-probabilities",
    ]
    assert masked
    assert any(ranked)


def test_nothing_of_it_is_left_in_the_engine_or_known_to_its_agent(local: LocalEngine) -> None:
    engine = local.engine
    agent = agent_of(engine)
    assert agent is not None
    before = agent.counters()
    manager, scheduler = engine.req_manager, engine.scheduler

    assert local.runner.run(warm(engine, lambda _: None)) is not None

    assert (engine.req_manager, engine.scheduler) == (manager, scheduler)
    assert not scheduler.get_sessions()
    assert not scheduler.block_trie.leaves
    assert timeline_of(scheduler) is None
    after = agent.counters()
    assert (after.seq, after.stored, after.resident_blocks) == (before.seq, before.stored, before.resident_blocks)
    assert after.tiers == before.tiers
    assert not [task for task in asyncio.all_tasks(local.runner.get_loop()) if not task.done()]


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_an_engine_that_does_half_of_requests_is_warmed_and_holds_nothing(tiny_llama: Path, role: str) -> None:
    from lmdeploy.pytorch.disagg.config import EngineRole

    with LocalEngine.start(tiny_llama, role=EngineRole[role], max_batch_size=8) as half:
        agent = agent_of(half.engine)
        assert agent is not None
        assert agent.pd is not None
        before = agent.counters().pd

        assert half.runner.run(warm(half.engine, lambda _: None)) is not None

        assert agent.counters().pd == before
        assert not half.engine.scheduler.get_sessions()
        assert not [task for task in asyncio.all_tasks(half.runner.get_loop()) if not task.done()]


def test_answers_after_it_are_those_of_an_engine_that_started_cold(local: LocalEngine, tiny_llama: Path) -> None:
    local.runner.run(warm(local.engine, lambda _: None))
    sampled = Sampling(top_k=20, temperature=0.8, seed=7)
    warmed = [local.generate(PROMPTS), local.generate(PROMPTS), local.generate_each([(PROMPTS[0], sampled)])]

    with LocalEngine.start(tiny_llama, enable_prefix_caching=True, max_batch_size=8) as cold:
        assert warmed == [cold.generate(PROMPTS), cold.generate(PROMPTS), cold.generate_each([(PROMPTS[0], sampled)])]


def test_a_warm_up_that_takes_too_long_is_logged_and_the_engine_starts_cold(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_WARM_UP_LIMIT_S", "0.000001")
    lines: list[str] = []

    assert local.runner.run(warm(local.engine, lines.append)) is None

    assert lines[-1].startswith("the warm-up failed (TimeoutError")
    assert [len(answer) for answer in local.generate(PROMPTS)] == [24] * 3


def test_a_warm_up_can_be_switched_off(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_WARM_UP_LIMIT_S", "0")
    lines: list[str] = []

    assert local.runner.run(warm(local.engine, lines.append)) is None
    assert lines == ["no warm-up: KVGATE_ENGINE_WARM_UP_LIMIT_S is 0"]
    assert warm_up_s_of(local.engine) is None


def test_an_engine_of_few_blocks_is_warmed_within_its_context(tiny_llama: Path) -> None:
    with LocalEngine.start(tiny_llama, num_gpu_blocks=16, session_len=48, max_batch_size=1) as small:
        assert small.runner.run(warm(small.engine, lambda _: None)) is not None


def test_prompts_are_as_long_as_two_chunks_and_a_rest_but_never_longer_than_the_context() -> None:
    def lengths(most_tokens: int) -> dict[str, list[int]]:
        planned = waves(block_tokens=64, chunk_tokens=2048, most_tokens=most_tokens, most_at_once=16, vocab_tokens=9)
        return {wave.name: [len(tokens) for tokens, _ in wave.prompts] for wave in planned}

    assert lengths(100_000)["two chunks and a rest"] == [4161]
    assert lengths(100_000)["most of it cached"] == [4161]
    assert lengths(100_000)["5 requests at once"] == [65, 129, 193, 257, 321]
    assert max(max(each) for each in lengths(1000).values()) == 1000


def test_an_instance_is_warm_before_it_is_healthy_and_counts_nothing_of_it(tiny_llama: Path, tmp_path: Path) -> None:
    with Instance.start(tiny_llama, tmp_path / "log") as instance:
        assert "kvgate engine: warm after " in instance.output()
        series = _metrics(instance.url)
        with urllib.request.urlopen(f"{instance.url}/kv/v1/stats", timeout=30) as answer:  # noqa: S310 - our own
            assert json.load(answer)["warm_up_s"] > 0
    assert series["kvgate_engine_kv_events_seq"] == -1
    assert series["lmdeploy:prompt_tokens_total"] == 0
    assert not any(value for name, value in series.items() if name.startswith("kvgate_engine_kv_events_total"))


def _metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:  # noqa: S310 - our own
        lines: list[str] = answer.read().decode().splitlines()
    found: dict[str, Any] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = found[name.partition("{")[0]] = float(value)
    return found
