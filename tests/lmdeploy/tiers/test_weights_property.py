"""Any sequence of changes of an engine's weights, beside requests or not, whole or broken off in the middle: no block
that was computed before is found, saved, announced, handed on from a tier, or pinned afterwards.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcontrol.core.hashing import chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.examples import examples
from tests.support.tiered_engine import BLOCK, PROMPTS
from tests.support.trainer import Trainer
from tests.support.two_models import OTHERS, OURS, UNKNOWN, two_models, undisturbed_answers
from tests.support.weights import broken_after, read_weights, update_request

pytestmark = pytest.mark.engine

SALTS = ("", "tenant-a")
NEW_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that happens to an engine. ``way`` is a change of weights, or what may come between; ``after`` so many
    tokens of a request that is running, None for no request; ``tensors`` of a change arrive before it breaks off.
    """

    way: str
    prompt: int
    after: int | None
    tensors: int


@dataclass(slots=True)
class Watched:
    """An engine, what its weights are, and every name that a block had under earlier ones."""

    engine: DisturbedEngine
    models: dict[str, dict[str, Any]]
    folder: Path
    answers: dict[str, list[list[int]]]
    faults: Callable[..., None]
    weights: str = OURS
    gone: set[BlockHash] = field(default_factory=set)
    revisions: set[str] = field(default_factory=set)

    def names(self) -> set[BlockHash]:
        """All blocks that are announced to be anywhere."""
        return set().union(*self.engine.resident().values())

    def do(self, step: Step) -> None:
        if step.way == "ask":
            self.ask(step.prompt)
        elif step.way == "evict":
            self.engine.evict_hbm()
        elif step.way == "pin":
            self.pin(step.prompt)
        elif step.way == "slow saves":
            self.faults(engine_read={"delay_s": 0.05})
        elif step.way == "sleep":
            self.engine.do(lambda: self.within(step, self.engine.sleep_and_wake))
        else:
            self.change(step)

    def ask(self, prompt: int) -> None:
        [answer] = self.engine.run(PROMPTS[prompt], new_tokens=NEW_TOKENS, salt=SALTS[prompt % 2])
        assert self.weights == UNKNOWN or answer == self.answers[self.weights][prompt]

    def pin(self, prompt: int) -> None:
        self.ask(prompt)
        self.engine.rest()

        async def pin() -> None:
            held = self.names()
            path = [name for name in self.chain(PROMPTS[prompt], SALTS[prompt % 2])[:4] if name in held]
            if path:
                self.engine.agent.pins.pin(path, None)
                assert self.engine.agent.pins.report().pins

        self.engine.do(pin)

    def chain(self, tokens: Sequence[int], salt: str) -> Sequence[BlockHash]:
        """The names that these tokens' blocks have now."""
        root = root_hash(self.engine.agent.tracker.identity, salt=salt)
        whole = len(tokens) // BLOCK * BLOCK
        return chain_hashes(root, token_bytes(tokens[:whole]), BLOCK)

    def change(self, step: Step) -> None:
        """Change the weights and look at once, with a request still running where there is one, and again at rest."""
        self.gone |= self.names()
        for number, prompt in enumerate(PROMPTS):
            for known in self.answers.values():
                self.gone |= {*self.chain([*prompt, *known[number]], SALTS[number % 2])}
            self.gone |= {*self.chain(prompt, "tenant-a")}
        self.revisions.add(self.engine.agent.tracker.identity.revision)
        found = self.engine.local.hit_tokens, self.engine.offload.loads

        async def change() -> None:
            try:
                await self.changed(step)
            finally:
                self.look()

        self.engine.do(lambda: self.within(step, change))
        assert self.engine.agent.tracker.identity.revision not in self.revisions
        self.faults()
        self.ask(step.prompt)  # what asked before is computed again, too, so that it may be found; not what was before
        if step.after is None:
            assert (self.engine.local.hit_tokens, self.engine.offload.loads) == found
        self.engine.rest()
        self.look()

    async def changed(self, step: Step) -> None:
        """The change itself, however it ends."""
        lmdeploy = self.engine.local.engine
        match step.way:
            case "ours" | "others":
                self.weights = UNKNOWN
                await self.engine.update(update_request(self.models[step.way]))
                self.weights = step.way
            case "broken off":
                await self.broken_off(step.tensors)
            case "broadcast fails":  # before a tensor was received
                request = Trainer(port=1, folder=self.folder).weights_request
                assert not (await lmdeploy.update_weights_from_distributed(request))[0]
            case "deep sleep" | "deep sleep, broken off":
                await lmdeploy.sleep(2)
                self.look()
                lmdeploy.wakeup(["weights"])
                if step.way == "deep sleep":
                    await self.engine.update(update_request(self.models[OTHERS]))
                    self.weights = OTHERS
                else:
                    await self.broken_off(step.tensors)
                lmdeploy.wakeup(["kv_cache"])
            case way:
                raise AssertionError(way)

    async def broken_off(self, tensors: int) -> None:
        whole = self.models[OTHERS if self.weights == OURS else OURS]
        self.weights = UNKNOWN
        with pytest.raises(Exception, match=r"(?i)size|shape"):
            await self.engine.update(update_request(broken_after(whole, [*whole][:tensors])))

    async def within(self, step: Step, operation: Callable[[], Awaitable[Any]]) -> Ended | None:
        if step.after is None:
            await operation()
            return None
        [task] = await self.engine.beside([(PROMPTS[step.prompt], NEW_TOKENS)], operation, after=step.after)
        ended: Ended = await task
        assert ended.how in {"FINISH", "CANCEL"}
        return ended

    def look(self) -> None:
        """Nothing of earlier weights is announced, in the trie, in a tier, held for a transfer, or pinned."""
        from engines.lmdeploy.trie.prefixes import find_nodes

        assert not self.names() & self.gone
        assert not find_nodes(self.engine.scheduler.block_trie, self.gone)
        assert not {block.key for _, block in self.engine.hierarchy.blocks()} & self.gone
        pins = self.engine.agent.pins
        assert not pins.report().pins
        pins.check_integrity()


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_models(tiny_llama, tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    return undisturbed_answers(models, NEW_TOKENS)


@pytest.fixture(scope="module")
def _hooked(answers: object, _hooks: None) -> None:
    """The answers first."""


@pytest.fixture
def watched(
    models: dict[str, Path],
    answers: dict[str, list[list[int]]],
    _hooked: None,
    monkeypatch: pytest.MonkeyPatch,
    faults: Callable[..., None],
) -> Iterator[Watched]:
    monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(64 << 20))
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    with DisturbedEngine.start(models[OURS], num_gpu_blocks=96) as engine:
        weights = {name: read_weights(folder) for name, folder in models.items()}
        yield Watched(engine, weights, models[OURS], answers, faults)
        assert engine.do(engine.is_alive)


CHANGES = ["ours", "others", "broken off", "broadcast fails", "deep sleep", "deep sleep, broken off"]
BETWEEN = ["ask", "ask", "evict", "pin", "slow saves", "sleep"]


def steps_of(ways: Sequence[str]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        way=st.sampled_from(ways),
        prompt=st.integers(0, len(PROMPTS) - 1),
        after=st.none() | st.integers(1, NEW_TOKENS // 2),
        tensors=st.integers(0, 12),
    )


def test_no_block_of_earlier_weights_is_left_whatever_happens_to_an_engine(watched: Watched) -> None:
    @settings(
        max_examples=examples(80, least=12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(before=st.lists(steps_of(BETWEEN), min_size=1, max_size=4), change=steps_of(CHANGES))
    def holds(before: list[Step], change: Step) -> None:
        for step in (*before, change):
            watched.do(step)

    holds()
    watched.faults()
    watched.engine.check()
