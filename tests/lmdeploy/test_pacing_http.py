"""The pace of a whole instance: set by the environment, swapped over HTTP, and the same answers under each."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcontrol.core.policy_control import POLICY_PATH
from kvcontrol.core.steps import STEPS_PATH
from tests.support.instance import Instance

pytestmark = pytest.mark.engine

WITHIN_S = 200.0
LONG = "the quick brown fox jumps over the lazy dog and "


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pacing") / "log"


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, log: Path) -> Iterator[Instance]:
    options = ("--max-prefill-token-num", "64", "--num-gpu-blocks", "600", "--enable-prefix-caching")
    settings = {"KVGATE_ENGINE_ITL_TARGET_MS": "1", "KVGATE_ENGINE_CONTROL_TIMEOUT_S": "30"}
    with Instance.start(tiny_llama, log, *options, settings=settings) as instance:
        yield instance


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(WITHIN_S):
        yield session


async def pace(instance: Instance, session: aiohttp.ClientSession, name: str = "", **params: float) -> dict[str, Any]:
    """Return the pace in charge, after a swap where a ``name`` is given."""
    url = f"{instance.url}{POLICY_PATH}"
    change = {"kind": "pace", "name": name, "params": params}
    async with session.put(url, json=change) if name else session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        policies = (await answer.json())["policies"]
    found: dict[str, Any] = next(each for each in policies if each["kind"] == "pace")
    return found


async def answers(instance: Instance, session: aiohttp.ClientSession, seed: str) -> list[list[str]]:
    """Return the texts of long and short prompts at once, two of each."""

    async def one(text: str) -> list[str]:
        body = {"model": "m", "prompt": text, "max_tokens": 30, "n": 2, "temperature": 0, "ignore_eos": True}
        async with session.post(f"{instance.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return [choice["text"] for choice in (await answer.json())["choices"]]

    texts = [f"{seed} {number} " + LONG * (1 + 9 * (number % 2)) for number in range(6)]
    return await asyncio.gather(*map(one, texts))


async def steps(instance: Instance, session: aiohttp.ClientSession, **query: int) -> dict[str, Any]:
    async with session.get(f"{instance.url}{STEPS_PATH}", params=query) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_answers_are_the_same_under_every_pace(instance: Instance, session: aiohttp.ClientSession) -> None:
    given = {}
    for name, params in (("lmdeploy", {}), ("alternate", {}), ("itl_target", {"itl_target_ms": 5.0})):
        assert (await pace(instance, session, name, **params))["name"] == name
        given[name] = await answers(instance, session, "tell")
    assert given["alternate"] == given["itl_target"] == given["lmdeploy"]
    assert (await pace(instance, session))["pace"]["errors"] == 0


async def test_a_target_below_a_step_is_logged_and_shown_with_what_runs_instead(
    instance: Instance, session: aiohttp.ClientSession, log: Path
) -> None:
    await pace(instance, session, "itl_target", itl_target_ms=1)
    await answers(instance, session, "unmet")
    found = await pace(instance, session)
    assert found["pace"]["unmet"].startswith("a decode step takes ")
    assert "the ITL target of 1 ms can't be kept: a decode step takes " in log.read_text(encoding="utf-8")
    text = ""
    while "kvgate_engine_up 1.0" not in text:  # a scrape's deadline is short
        async with session.get(f"{instance.url}/metrics") as answer:
            text = await answer.text()
    assert "kvgate_engine_itl_target_unmet 1.0" in text
    assert 'kvgate_engine_pace_in_charge{pace="itl_target"} 1.0' in text


async def test_steps_are_shown_with_why_they_were_chosen(instance: Instance, session: aiohttp.ClientSession) -> None:
    await pace(instance, session, "itl_target", itl_target_ms=5)
    before = await steps(instance, session, last=1)
    number = before["steps"][-1]["number"] if before["steps"] else 0
    await answers(instance, session, "steps")
    found = await steps(instance, session, after=number, last=8192)
    assert {"prefill", "chunk", "decode"} <= {step["kind"] for step in found["steps"]}
    assert {"owed", "chunk"} <= {step["reason"] for step in found["steps"]}
    added = found["totals"]["steps"]["decode"] - before["totals"]["steps"]["decode"]
    assert added == sum(step["kind"] == "decode" for step in found["steps"])
    assert found["summary"]["pause"]["count"] > 0


async def test_a_pace_that_cannot_be_is_a_400_with_what_is_allowed(
    instance: Instance, session: aiohttp.ClientSession
) -> None:
    body = {"kind": "pace", "name": "itl_target", "params": {"itl_target_ms": 0}}
    async with session.put(f"{instance.url}{POLICY_PATH}", json=body) as answer:
        assert answer.status == 400
        assert "itl_target_ms is 0; allowed is a number from 1 to 60000" in await answer.text()
