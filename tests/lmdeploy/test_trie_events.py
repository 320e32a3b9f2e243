"""What is announced against what the block trie really holds, with the engine in the test's own process."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.control.operations import SNAPSHOT, STATS
from engines.lmdeploy.agent import EngineAgent, agent_of
from engines.lmdeploy.http.admin import ControlClient
from kvcontrol.core.control import InstanceStats, Snapshot
from kvcontrol.core.hashing import child_hash, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from tests.support.engine import LocalEngine, Sampling
from tests.support.kv_events import block_names, hbm, held_after, replay
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

BLOCK = 16
WITHIN_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import (
        event_hooks,
        eviction_hooks,
        interruption_hooks,
        key_hooks,
        schedule_hooks,
        step_hooks,
        tenant_hooks,
    )
    from engines.lmdeploy.patching import install

    undo = install(
        [
            *event_hooks(),
            *interruption_hooks(),
            *eviction_hooks(),
            *key_hooks(),
            *tenant_hooks(),
            *schedule_hooks(),
            *step_hooks(),
        ]
    )
    yield
    undo()


class Watched:
    """An engine and its agent, asked over the control socket as the api_server does."""

    def __init__(self, local: LocalEngine, endpoint: str) -> None:
        self.local = local
        self.client = ControlClient(endpoint, timeout_s=WITHIN_S)

    @property
    def agent(self) -> EngineAgent:
        agent = agent_of(self.local.engine)
        assert agent is not None
        return agent

    @property
    def trie(self) -> Any:
        return self.local.engine.scheduler.block_trie

    def stats(self) -> InstanceStats:
        return msgspec.json.decode(self.client.ask_now(STATS, timeout_s=WITHIN_S), type=InstanceStats)

    def snapshot(self) -> Snapshot:
        return msgspec.json.decode(self.client.ask_now(SNAPSHOT, timeout_s=WITHIN_S), type=Snapshot)

    def trie_names(self) -> set[BlockHash]:
        """The naive twin: walk the trie and name every node from its own tokens, not from what the hooks left there."""
        names: set[BlockHash] = set()
        identity = self.agent.tracker.identity

        def walk(node: Any, above: BlockHash) -> None:
            for child in node.children.values():
                name = child_hash(above, token_bytes([int(token) for token in child.token_ids]))
                names.add(name)
                walk(child, name)

        for adapter, root in self.trie._roots.items():
            walk(root, root_hash(identity, adapter=adapter or ""))
        return names


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = f"ipc://{tmp_path}/control"
    monkeypatch.setenv("KVGATE_ENGINE_CONTROL_ENDPOINT", endpoint)
    return endpoint


@pytest.fixture
def small(tiny_llama: Path, endpoint: str) -> Iterator[Watched]:
    """A pool of 32 blocks: two or three prompts fill it."""
    with LocalEngine.start(tiny_llama, num_gpu_blocks=32, enable_prefix_caching=True, max_batch_size=4) as local:
        watched = Watched(local, endpoint)
        yield watched
        watched.client.close()


def test_the_mirror_is_the_trie_through_eviction_reuse_and_preemption(small: Watched) -> None:
    shared = random_prompt(4 * BLOCK + 3, 0)
    for turn in range(12):
        prompts = [
            shared + random_prompt(BLOCK * (turn % 4), 100 + turn),
            random_prompt(BLOCK * 5 + turn, 200 + turn % 5),
            random_prompt(BLOCK * (1 + turn % 7), 300 + turn),
        ]
        small.local.generate(prompts, Sampling(new_tokens=BLOCK * (1 + turn % 5)))
        state = small.snapshot()
        assert hbm(state) == small.trie_names()
        assert len(state.hashes(next(iter(state.tiers)))) == len(hbm(state))
    counters = small.agent.counters()
    assert counters.removed > 0
    assert counters.hook_errors == counters.dropped == counters.publisher_errors == 0
    assert small.local.hit_tokens > 0
    state = small.snapshot()
    assert held_after(replay(small.agent.publisher.replay_endpoint)) == hbm(state)


def test_a_queue_that_overflows_still_ends_in_the_truth(
    tiny_llama: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_PENDING_BLOCKS", "2")
    with LocalEngine.start(tiny_llama, num_gpu_blocks=32, enable_prefix_caching=True) as local:
        watched = Watched(local, endpoint)
        for seed in range(6):
            local.generate([random_prompt(BLOCK * 8, seed)])
        state = watched.snapshot()
        watched.client.close()
        assert hbm(state) == watched.trie_names()
        assert held_after(replay(watched.agent.publisher.replay_endpoint)) == hbm(state)
        assert watched.agent.counters().dropped > 0


def test_a_block_that_cannot_be_announced_is_counted_and_the_request_is_served(small: Watched) -> None:
    from lmdeploy.messages import GenerationConfig
    from lmdeploy.pytorch.messages import SamplingParam

    # A salt that no api_server lets through: the hash refuses it, the engine must not notice.
    config = GenerationConfig(max_new_tokens=4, top_k=1)
    config.kvgate_cache_salt = "x" * 100
    assert SamplingParam.from_gen_config(config).kvgate_cache_salt == "x" * 100
    prompt = random_prompt(BLOCK * 4, 7)
    plain = small.local.generate([prompt], Sampling(new_tokens=4))

    async def salted() -> list[int]:
        tokens: list[int] = []
        async for output in small.local.engine.create_instance().async_stream_infer(999, prompt, gen_config=config):
            tokens.extend(output.token_ids)
        return tokens

    assert [small.local.runner.run(salted())] == plain
    stats = small.stats()
    assert stats.events.hook_errors == 1  # the chain's first block; those after it are not attempted
    assert hbm(small.snapshot()) == set(block_names(stats.identity, prompt))


def test_sleep_forgets_the_cache_and_waking_serves_no_stale_block(small: Watched) -> None:
    prompt = random_prompt(BLOCK * 6, 3)
    before = small.local.generate([prompt])
    assert hbm(small.snapshot())
    small.local.runner.run(small.local.engine.sleep(1))
    assert hbm(small.snapshot()) == set() == small.trie_names()
    assert small.agent.counters().cleared == 1
    small.local.engine.wakeup()
    hits = small.local.hit_tokens
    assert small.local.generate([prompt]) == before
    assert small.local.hit_tokens == hits
    assert hbm(small.snapshot()) == small.trie_names()


def test_other_weights_are_another_identity_and_an_empty_cache(small: Watched) -> None:
    prompt = random_prompt(BLOCK * 3, 5)
    small.local.generate([prompt], Sampling(new_tokens=4))
    old = small.snapshot()
    small.agent.weights_changed()
    new = small.snapshot()
    assert hbm(new) == set() == small.trie_names()
    assert new.identity.revision.startswith(f"{old.identity.revision}+")
    small.local.generate([prompt], Sampling(new_tokens=4))
    assert hbm(small.snapshot()) == set(block_names(new.identity, prompt))
    assert not hbm(small.snapshot()) & hbm(old)


def test_without_prefix_caching_nothing_is_announced_and_stats_work(tiny_llama: Path, endpoint: str) -> None:
    with LocalEngine.start(tiny_llama, num_gpu_blocks=32, enable_prefix_caching=False) as local:
        watched = Watched(local, endpoint)
        local.generate([random_prompt(BLOCK * 4, 1)])
        assert watched.snapshot().tiers == {}
        assert watched.stats().prefix_cache.query_tokens == 0
        watched.client.close()


@pytest.mark.usefixtures("endpoint")
def test_the_agent_goes_with_its_engine(tiny_llama: Path) -> None:
    with LocalEngine.start(tiny_llama, num_gpu_blocks=32, enable_prefix_caching=True) as local:
        local.generate([random_prompt(BLOCK, 1)])
        assert any(thread.name == "kvgate-events" for thread in threading.enumerate())
    assert not any(thread.name == "kvgate-events" for thread in threading.enumerate())
