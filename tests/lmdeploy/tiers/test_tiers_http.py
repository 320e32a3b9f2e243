"""Contexts revisited over HTTP while everything goes wrong: the tokens are always those of a run that never evicted."""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats
from tests.support.instance import Instance
from tests.support.revisits import Answer, answers, context, leave_early
from tests.support.tiered_instance import TieredInstance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # several starts of an instance, on busy cores

OPTIONS = ("--logprobs-mode", "raw_logprobs")
"""So that answers come with their tokens."""
BLOCK = 16
BLOCK_BYTES = 8192
NEW_TOKENS = 8
WORDS = 40
CONTEXTS = [context(seed, WORDS) for seed in range(24)]
SEEN = 12
"""So many of them are visited before the disk is full."""
AT_ONCE = 16
SHARED_AT = 64
"""The run with this pool has its DDR tier in shared memory."""
_FAULTS = {
    "engine.read": {"fail": 0.15, "delay_s": 0.002},
    "engine.write": {"fail": 0.15, "delay_s": 0.002},
    "file.read": {"fail": 0.15, "delay_s": 0.002},
    "file.write": {"fail": 0.15, "delay_s": 0.002},
}
_FULL = {"file.write": {"full": 1.0}}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What an instance says that has room for all of them and no tiers."""
    log = tmp_path_factory.mktemp("reference") / "log"
    with Instance.start(tiny_llama, log, "--num-gpu-blocks", "1024", *OPTIONS) as reference:
        return answers(reference.url, CONTEXTS, new_tokens=NEW_TOKENS)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@dataclass(slots=True)
class Revisits:
    """Visits of random contexts by many clients at once; ``wrong`` collects answers that are not what they must be."""

    instance: TieredInstance
    expected: list[Answer]
    wrong: list[str] = field(default_factory=list)
    done: int = 0
    _chooser: random.Random = field(default_factory=lambda: random.Random(2))  # noqa: S311 - which context

    def run(self, visits: int, *, among: int, in_the_middle: Callable[[], None] | None = None) -> None:
        """Visit the first ``among`` contexts; all answers are in when it returns."""
        passed = threading.Semaphore(0)

        def visit(place: int) -> None:
            answer = self.instance.ask(CONTEXTS[place], new_tokens=NEW_TOKENS)
            if answer.tokens != self.expected[place].tokens:
                self.wrong.append(f"context {place}: {answer.tokens}, expected {self.expected[place].tokens}")
            passed.release()

        with ThreadPoolExecutor(AT_ONCE) as clients:
            asked = [clients.submit(visit, self._chooser.randrange(among)) for _ in range(visits)]
            if in_the_middle is not None:
                for _ in range(visits // 2):
                    assert passed.acquire(timeout=120)
                in_the_middle()
            for each in asked:
                each.result(120)
        self.done += visits


@contextmanager
def cancelling(instance: TieredInstance) -> Iterator[Callable[[], int]]:
    """Beside everything else, clients that go away in the middle of a request; yields how many did."""
    stop, gone = threading.Event(), 0
    chooser = random.Random(4)  # noqa: S311 - delays

    def go_away() -> None:
        nonlocal gone
        while not stop.wait(0.02 + chooser.random() * 0.1):
            if not instance.up.is_set():
                continue
            try:
                leave_early(instance.url, chooser.choice(CONTEXTS), chooser.random() * 0.5)
                gone += 1
            except (OSError, HTTPException):
                continue  # it is being killed

    thread = threading.Thread(target=go_away)
    thread.start()
    try:
        yield lambda: gone
    finally:
        stop.set()
        thread.join(60)


def full_blocks(answer: Answer) -> int:
    """Tokens of a prompt that can be cached: whole blocks, and never the last token."""
    return (answer.prompt - 1) // BLOCK * BLOCK


def settings_of(folder: Path, ddr_path: Path | None) -> dict[str, str]:
    disk = folder / "disk"
    disk.mkdir()
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(64 * BLOCK_BYTES),
        "KVGATE_ENGINE_NVME_PATH": str(disk),
        "KVGATE_ENGINE_NVME_BYTES": str(512 * BLOCK_BYTES),
    }
    return settings | ({} if ddr_path is None else {"KVGATE_ENGINE_DDR_PATH": str(ddr_path / "arena")})


@pytest.mark.parametrize(
    "pool_blocks",
    [
        32,
        pytest.param(16, marks=pytest.mark.slow),
        pytest.param(SHARED_AT, marks=pytest.mark.slow),
    ],
)
def test_revisits_give_the_tokens_of_a_run_without_eviction_whatever_happens(
    tiny_llama: Path,
    tmp_path: Path,
    shared_memory: Path,
    expected: list[Answer],
    pool_blocks: int,
) -> None:
    settings = settings_of(tmp_path, shared_memory if pool_blocks == SHARED_AT else None)
    with TieredInstance.begin(
        tiny_llama, tmp_path, settings, "--num-gpu-blocks", str(pool_blocks), *OPTIONS
    ) as instance:
        revisits = Revisits(instance, expected)
        first_life: list[OffloadStats] = []
        at_restart: list[Answer] = []

        def kill_and_start_again() -> None:
            first_life.append(instance.offload)
            instance.kill()
            instance.start()
            instance.wait()
            at_restart.extend(answers(instance.url, CONTEXTS, new_tokens=NEW_TOKENS))
            instance.up.set()

        with cancelling(instance) as gone:
            revisits.run(30, among=SEEN)
            instance.break_transfers(_FAULTS)
            revisits.run(50, among=SEEN)
            instance.break_transfers(_FULL)
            revisits.run(30, among=len(CONTEXTS))
            instance.break_transfers({})
            assert instance.flip_bytes(share=0.3) > 0
            revisits.run(30, among=len(CONTEXTS))
            instance.break_transfers(_FAULTS)
            revisits.run(40, among=len(CONTEXTS), in_the_middle=kill_and_start_again)
            instance.break_transfers({})
            revisits.run(20, among=len(CONTEXTS))
        assert revisits.wrong == []
        assert revisits.done == 200
        assert gone() > 0
        assert [answer.tokens for answer in at_restart] == [answer.tokens for answer in expected]
        assert sum(answer.cached for answer in at_restart) > 0, "nothing was found again after the restart"
        for stats in (first_life[0], instance.offload):
            assert stats.loads > 0
            assert (stats.guard_errors, stats.worker_faults, stats.collisions) == (0, 0, 0)
        assert first_life[0].failed_loads + instance.offload.failed_loads > 0
        assert first_life[0].paths["ddr_to_nvme"].failed_blocks > 0
        assert any(name.startswith("load:corrupt") for name in first_life[0].outcomes)
        until_all_is_restored(instance, expected)


def until_all_is_restored(instance: TieredInstance, expected: list[Answer]) -> None:
    """In peace again, all that is evicted from HBM comes back, and is counted as cached."""
    cached: list[int] = []
    for _ in range(8):
        again = answers(instance.url, CONTEXTS, new_tokens=NEW_TOKENS)
        assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]
        cached = [answer.cached for answer in again]
        if cached == [full_blocks(answer) for answer in expected]:
            return
        time.sleep(1)  # a disk that was full is left alone for some seconds
    assert cached == [full_blocks(answer) for answer in expected]


@pytest.mark.slow
@pytest.mark.parametrize("tier", [CacheTier.DDR, CacheTier.NVME])
def test_a_killed_instance_finds_its_blocks_again(
    tiny_llama: Path, tmp_path: Path, shared_memory: Path, expected: list[Answer], tier: CacheTier
) -> None:
    settings = settings_of(tmp_path, shared_memory if tier is CacheTier.DDR else None)
    if tier is CacheTier.DDR:
        settings = {name: value for name, value in settings.items() if "NVME" not in name}
        settings["KVGATE_ENGINE_DDR_BYTES"] = str(512 * BLOCK_BYTES)
    with TieredInstance.begin(tiny_llama, tmp_path, settings, "--num-gpu-blocks", "32", *OPTIONS) as instance:
        for text in CONTEXTS:
            instance.ask(text, new_tokens=NEW_TOKENS)
        held = until_steady(instance, tier)
        for _ in range(2):
            instance.kill()
            instance.start()
            instance.wait()
            instance.up.set()
            assert instance.stats().tiers[tier].cached_blocks == held
        again = [instance.ask(text, new_tokens=NEW_TOKENS) for text in CONTEXTS]
        assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]
        assert [answer.cached for answer in again] == [full_blocks(answer) for answer in expected]


def until_steady(instance: TieredInstance, tier: CacheTier) -> int:
    """Wait until a tier gains no more blocks, and return how many it holds."""
    before = -1
    for _ in range(60):
        now = instance.stats().tiers[tier].cached_blocks
        if now == before:
            return now
        before = now
        time.sleep(0.5)
    raise AssertionError(f"{tier} never rests")
