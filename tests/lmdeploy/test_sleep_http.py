"""Sleep, wake and other weights of an instance process, asked over HTTP while it answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.instance import Instance
from tests.support.kv_events import stats
from tests.support.models import random_prompt
from tests.support.sleepers import Beside, Stream, generate, post
from tests.support.weights import read_weights, update_body

pytestmark = pytest.mark.engine

LONG = [random_prompt(100, 1), random_prompt(120, 2)]
PROMPT = random_prompt(60, 3)
TOKENS = 8


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    log = tmp_path_factory.mktemp("instance") / "log"
    settings = {"KVGATE_ENGINE_DDR_BYTES": str(16 << 20)}
    with Instance.start(
        tiny_llama, log, "--session-len", "512", "--max-batch-size", "8", settings=settings
    ) as instance:
        yield instance


@pytest.fixture(scope="module")
def tokens(instance: Instance) -> list[int]:
    """The prompt's answer before anything happened."""
    return generate(instance.url, PROMPT, new_tokens=TOKENS, salt="tenant-b").tokens


@pytest.mark.parametrize("cycles", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_sleep_beside_requests_fails_them_clearly_and_the_next_one_gets_its_own_answer(
    instance: Instance, tokens: list[int], cycles: int
) -> None:
    url = instance.url
    for _ in range(cycles):
        long = [
            Beside(url, "/generate", {"input_ids": prompt, "max_tokens": 200, "ignore_eos": True}, salt="tenant-a")
            for prompt in LONG
        ]
        stream = Stream(url, "hello", new_tokens=400)
        sleeping = Beside(url, "/sleep?level=1")
        woken = post(url, "/wakeup?tags=weights&tags=kv_cache")  # at once, sooner than the sleep or later
        assert sleeping.result().status == woken.status == 200
        post(url, "/wakeup")  # for a wake that came first
        assert generate(url, PROMPT, new_tokens=TOKENS, salt="tenant-b").tokens == tokens
        text = stream.rest()
        assert "put to sleep before the answer was complete" in text
        assert '"finish_reason":"abort"' not in text.replace(" ", "")
        for each in long:
            got = each.result()
            assert got.status == 503 or (got.status, len(got.tokens)) == (200, 200)
    assert stats(url).load.running == 0


def test_other_weights_answer_otherwise_and_the_old_ones_again_as_before_with_nothing_cached(
    instance: Instance, tokens: list[int], tiny_llama: Path, tmp_path: Path
) -> None:
    from engines.models.tiny import build_tiny

    url, revisions = instance.url, {stats(instance.url).identity.revision}
    for folder, same in ((build_tiny(tmp_path / "other", seed=1), False), (tiny_llama, True)):
        assert post(url, "/update_weights", update_body(read_weights(folder))).status == 200
        revisions.add(stats(url).identity.revision)
        hits = stats(url).prefix_cache.hit_tokens
        assert (generate(url, PROMPT, new_tokens=TOKENS, salt="tenant-b").tokens == tokens) is same
        assert stats(url).prefix_cache.hit_tokens == hits
    assert len(revisions) == 3
