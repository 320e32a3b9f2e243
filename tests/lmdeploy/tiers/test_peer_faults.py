"""What other tiered caches got wrong, tried over HTTP: docs/design/kv-runtime.md has the list.

The reference is what the instance itself answers when it sees a context for the first time: then nothing is restored.
"""

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvcontrol.core.blocks import CacheTier
from tests.support.kv_events import post
from tests.support.processes import eventually
from tests.support.revisits import Answer, context, leave_early
from tests.support.tiered_instance import FILE_NAME, TieredInstance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 16
BLOCK_BYTES = 8192
HBM, DDR, NVME = 32, 64, 512
NEW_TOKENS = 8
LOAD_DEADLINE_S = 2.0
CONTEXTS = [context(seed, 40) for seed in range(16)]


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredInstance]:
    folder = tmp_path_factory.mktemp("peers")
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(DDR * BLOCK_BYTES),
        "KVGATE_ENGINE_NVME_PATH": str(folder),
        "KVGATE_ENGINE_NVME_BYTES": str(NVME * BLOCK_BYTES),
        "KVGATE_ENGINE_LOAD_DEADLINE_S": str(LOAD_DEADLINE_S),
    }
    options = ("--num-gpu-blocks", str(HBM), "--logprobs-mode", "raw_logprobs")
    with TieredInstance.begin(tiny_llama, folder, settings, *options) as instance:
        yield instance


@pytest.fixture(scope="module")
def expected(instance: TieredInstance) -> list[Answer]:
    first = asked(instance, CONTEXTS)
    assert instance.offload.loads == 0
    return first


@pytest.fixture(autouse=True)
def _nothing_is_left_over(instance: TieredInstance) -> Iterator[None]:
    """Each test begins and ends with tiers that work, with nothing in flight, and with nothing that nobody holds."""
    instance.break_transfers({})
    yield
    instance.break_transfers({})
    eventually(lambda: at_rest(instance), 120, "an instance at rest, all of whose blocks are cached ones")
    offload = instance.offload
    assert (offload.guard_errors, offload.worker_faults, offload.collisions) == (0, 0, 0)


def at_rest(instance: TieredInstance) -> bool:
    stats = instance.stats()
    assert stats.offload is not None
    return not any(path.queued_blocks for path in stats.offload.paths.values()) and all(
        tier.used_blocks == tier.cached_blocks for tier in stats.tiers.values()
    )


def asked(instance: TieredInstance, texts: Sequence[str], *, salt: str = "") -> list[Answer]:
    return [instance.ask(text, new_tokens=NEW_TOKENS, salt=salt) for text in texts]


def tokens(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    return [answer.tokens for answer in answers]


def full_blocks(answer: Answer) -> int:
    return (answer.prompt - 1) // BLOCK * BLOCK


def until_restored(instance: TieredInstance, expected: Sequence[Answer]) -> None:
    """Everything is found again: the tiers have come to themselves."""

    def restored() -> bool:
        again = asked(instance, CONTEXTS)
        assert tokens(again) == tokens(expected)
        return all(answer.cached == full_blocks(answer) for answer in again)

    eventually(restored, 240, "all contexts restored in full")


def test_identical_prompts_at_once_that_are_all_restored_get_one_answer(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    before = instance.offload.loads
    for place in (0, 5, 9):
        asked(instance, [text for text in CONTEXTS if text is not CONTEXTS[place]])
        with ThreadPoolExecutor(32) as clients:
            answers = list(clients.map(lambda text: instance.ask(text, new_tokens=NEW_TOKENS), [CONTEXTS[place]] * 32))
        assert set(tokens(answers)) == {expected[place].tokens}
    assert instance.offload.loads > before


def test_a_file_that_is_cut_short_under_a_running_instance_costs_hits_alone(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    eventually(lambda: instance.stats().tiers[CacheTier.NVME].cached_blocks > DDR, 60, "blocks that are in NVMe alone")
    os.truncate(Path(instance.settings["KVGATE_ENGINE_NVME_PATH"]) / FILE_NAME, 4096)
    assert tokens(asked(instance, CONTEXTS)) == tokens(expected)
    assert instance.offload.losses["NVME:corrupt"] > 0
    until_restored(instance, expected)


def test_a_disk_that_hangs_costs_a_deadline_and_never_an_answer(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    hangs_s = 20.0
    until_restored(instance, expected)
    instance.break_transfers({"file.read": {"delay_s": hangs_s}})
    took_s = []
    for place, text in enumerate(CONTEXTS[:4]):
        began_s = time.monotonic()
        assert instance.ask(text, new_tokens=NEW_TOKENS).tokens == expected[place].tokens
        took_s.append(time.monotonic() - began_s)
    assert max(took_s) < hangs_s, "an answer came no sooner than the disk did"
    outcomes = instance.offload.outcomes
    assert any(name.startswith("load:late:") or name.endswith(":stalled") for name in outcomes), outcomes
    instance.break_transfers({})
    until_restored(instance, expected)


def test_transfers_into_the_engine_that_fail_are_never_counted_as_loaded(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    until_restored(instance, expected)
    before = instance.offload
    instance.break_transfers({"engine.write": {"fail": 1.0}})
    again = asked(instance, CONTEXTS)
    assert tokens(again) == tokens(expected)
    after = instance.offload
    assert after.loads == before.loads
    assert after.failed_loads > before.failed_loads


def test_prompts_of_less_than_a_block_push_nothing_out(instance: TieredInstance, expected: list[Answer]) -> None:
    until_restored(instance, expected)
    below = {tier: stats.used_blocks for tier, stats in instance.stats().tiers.items() if tier is not CacheTier.HBM}
    for number in range(2 * HBM):
        body = {"model": "m", "prompt": f"{number}", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        answer = post(f"{instance.url}/v1/completions", body)
        assert answer.status == 200, answer
        assert answer.body["usage"]["total_tokens"] < BLOCK
    now = {tier: stats.used_blocks for tier, stats in instance.stats().tiers.items() if tier is not CacheTier.HBM}
    assert now == below
    again = asked(instance, CONTEXTS)
    assert [answer.cached for answer in again] == [full_blocks(answer) for answer in expected]


def test_a_tenant_that_replays_anothers_prompt_finds_nothing_in_any_tier(instance: TieredInstance) -> None:
    text = context(500, 40)
    first = instance.ask(text, new_tokens=NEW_TOKENS, salt="tenant-a")
    asked(instance, CONTEXTS)  # so that it has left HBM
    others = [instance.ask(text, new_tokens=NEW_TOKENS, salt=salt) for salt in ("tenant-b", "", "tenant-a2")]
    assert [answer.cached for answer in others] == [0, 0, 0]
    assert set(tokens(others)) == {first.tokens}
    asked(instance, CONTEXTS)
    again = instance.ask(text, new_tokens=NEW_TOKENS, salt="tenant-a")
    assert again.tokens == first.tokens
    assert again.cached == full_blocks(first), "its own tenant finds it"


def test_a_storm_far_beyond_the_pool_is_served_about_as_fast_as_a_few_at_a_time(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    until_restored(instance, expected)
    chooser = random.Random(6)  # noqa: S311 - which context
    places = [chooser.randrange(len(CONTEXTS)) for _ in range(48)]

    def serve(at_once: int) -> float:
        began_s = time.monotonic()
        with ThreadPoolExecutor(at_once) as clients:
            answers = list(clients.map(lambda place: instance.ask(CONTEXTS[place], new_tokens=NEW_TOKENS), places))
        assert tokens(answers) == [expected[place].tokens for place in places]
        return time.monotonic() - began_s

    few_s, many_s = min(serve(4), serve(4)), min(serve(48), serve(48))
    # on cores that others use too; a scheduler that thrashes is slower by far more
    assert many_s < 3 * few_s + 5, f"{few_s:.1f} s with 4 at once, {many_s:.1f} s with 48"


def test_clients_that_go_away_leave_no_blocks_and_no_memory_behind(
    instance: TieredInstance, expected: list[Answer]
) -> None:
    assert instance.instance is not None
    engine = instance.instance.engine_process()
    chooser = random.Random(8)  # noqa: S311 - delays

    def go_away(times: int) -> int:
        with ThreadPoolExecutor(4) as clients:
            for each in [
                clients.submit(leave_early, instance.url, chooser.choice(CONTEXTS), chooser.random() * 0.3)
                for _ in range(times)
            ]:
                each.result(120)
        eventually(lambda: at_rest(instance), 120, "nothing of the requests that were left")
        return resident_bytes(engine)

    before = go_away(150)
    after = go_away(300)
    assert after - before < 48 << 20, f"{(after - before) >> 20} MiB more after 300 requests that were left"
    assert tokens(asked(instance, CONTEXTS)) == tokens(expected)


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
