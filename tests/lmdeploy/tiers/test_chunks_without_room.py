"""Long prompts in a pool without room for them all, loaded ones among them: each is answered, and rightly."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.lmdeploy.schedule.pacing import pacer_of
from kvcontrol.scheduler_ir.pacing import make_pace
from tests.support.models import random_prompt
from tests.support.tiered_engine import TieredEngine

pytestmark = pytest.mark.engine

POOL = 40
CHUNK = 128
NEW_TOKENS = 24
SAVED = random_prompt(290, 40)
"""18 blocks of it are loaded."""
LOADED = SAVED + random_prompt(200, 41)
"""What isn't loaded is longer than a chunk: it is not computed beside another long prompt."""
COMPUTED = random_prompt(380, 42)
"""24 blocks: 16 of them and those that were loaded leave 6, and its last chunk needs 8."""
SHORT = random_prompt(40, 43)
LONGEST = random_prompt(560, 44)
PROMPTS = [LOADED, COMPUTED, SHORT, SAVED + random_prompt(90, 45), random_prompt(330, 46), LONGEST]
PACES = {"lmdeploy": {}, "alternate": {}, "itl_target": {"itl_target_ms": 1.0, "prefill_share": 0.5}}


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path) -> list[list[int]]:
    """The answers of an engine with room for all, that has no hooks of ours."""
    with TieredEngine.start(tiny_llama, num_gpu_blocks=256) as plain:
        return [plain.run(prompt, new_tokens=NEW_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture(params=[64 << 20, 0], ids=["tiers", "no tiers"])
def tight(
    request: pytest.FixtureRequest,
    tiny_llama: Path,
    undisturbed: list[list[int]],  # noqa: ARG001 - it first
    _hooks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TieredEngine]:
    monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(request.param))
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    with TieredEngine.start(tiny_llama, num_gpu_blocks=POOL, max_prefill_token_num=CHUNK, max_batch_size=8) as engine:
        yield engine


def use(engine: TieredEngine, pace: str) -> None:
    pacer = pacer_of(engine.scheduler)
    assert pacer is not None
    pacer.swap(make_pace(pace, PACES[pace]))


def evict(engine: TieredEngine) -> None:
    if engine.agent.tiers is not None:
        engine.rest()
    engine.evict_hbm()


def check(engine: TieredEngine) -> None:
    if engine.agent.tiers is not None:
        engine.check()


@pytest.mark.parametrize("tight", [64 << 20], indirect=True, ids=["tiers"])
@pytest.mark.parametrize("pace", PACES)
def test_a_chunk_without_room_takes_the_blocks_of_a_loaded_prompt_that_waits(
    tight: TieredEngine, undisturbed: list[list[int]], pace: str
) -> None:
    use(tight, pace)
    tight.run(SAVED)
    evict(tight)
    assert tight.run(LOADED, COMPUTED, SHORT, new_tokens=NEW_TOKENS) == undisturbed[:3]
    assert tight.offload.loads > 0
    check(tight)


@pytest.mark.parametrize("pace", PACES)
def test_long_prompts_that_come_together_are_all_answered_as_if_each_were_alone(
    tight: TieredEngine, undisturbed: list[list[int]], pace: str
) -> None:
    use(tight, pace)
    choose = random.Random(7)  # noqa: S311 - an order, not a secret
    for _ in range(6):
        places = choose.sample(range(len(PROMPTS)), 5)
        new_tokens = choose.choice([1, NEW_TOKENS])
        found = tight.run(*(PROMPTS[place] for place in places), new_tokens=new_tokens)
        assert found == [undisturbed[place][:new_tokens] for place in places]
        if choose.random() < 0.7:
            evict(tight)
    check(tight)
