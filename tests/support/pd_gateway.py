"""A gateway before a prefilling and an answering instance, and what clients and operators do to all three."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import psutil

from kvcontrol.core.roles import KVTransport
from tests.support.instance import Instance
from tests.support.pd_pair import Answer, Pair, at_once, complete, pd_of, streamed, whole
from tests.support.running_gateway import RunningGateway, running_gateway

LIMIT_S = 120.0


@asynccontextmanager
async def gateway_of(pair: Pair, model: Path, state: Path, **settings: Any) -> AsyncIterator[RunningGateway]:
    named = [{"id": "p0", "url": pair.prefill.url}, {"id": "d0", "url": pair.decode.url}]
    if pair.transport is KVTransport.TIERS:  # else the instances say so themselves
        named = [each | {"role": role} for each, role in zip(named, ("prefill", "decode"), strict=True)]
    more = {"tokenizer": model, "pd_min_uncached_tokens": 64, "health_interval_s": 1.0} | settings
    async with running_gateway(state, instances=named, **more) as gateway:
        await gateway.usable(2)
        yield gateway


def body_of(letters: int, seed: int, **more: Any) -> dict[str, Any]:
    dice = random.Random(letters * 1000 + seed)  # noqa: S311
    prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
    return {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


async def ask(gateway: RunningGateway, body: dict[str, Any]) -> tuple[Answer, str]:
    """Return the answer and the route that it took; fails unless it is 200."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with gateway.session.post(gateway.url + path, json=body, timeout=aiohttp.ClientTimeout(LIMIT_S)) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        found = streamed(text) if body.get("stream") else whole(await answer.json())
        return found, answer.headers["x-kvgate-route"]


def stop_or_go(instance: Instance, number: signal.Signals) -> None:
    for process in [*instance.children(), instance.process]:
        os.kill(process.pid, number)


def kill_all_of(instance: Instance) -> None:
    """Kill an instance, and return once it is gone."""
    children = instance.children()
    for process in [instance.process, *children]:
        os.kill(process.pid, signal.SIGKILL)
    instance.process.wait(60)
    psutil.wait_procs(children, timeout=60)


async def leave_at_any_moment(pair: Pair, gateway: RunningGateway, count: int) -> None:
    """Let so many clients leave, eight at a time: before, while and after their prompts change hands, and between two
    tokens. Then nothing is left of them, and answers are right.
    """
    dice = random.Random(count)  # noqa: S311
    bodies = [body_of(dice.choice([70, 300, 900]), seed, max_tokens=40, stream=True) for seed in range(count)]

    def left(body: dict[str, Any], after_s: float) -> bool:
        until_s = time.monotonic() + after_s
        try:
            with httpx2.stream(
                "POST", f"{gateway.url}/v1/completions", json=body, timeout=after_s, trust_env=False
            ) as answer:
                for _ in answer.iter_bytes():
                    if time.monotonic() >= until_s:
                        return True
        except httpx2.TimeoutException:
            return True
        return False

    def leave(job: tuple[dict[str, Any], float]) -> None:
        body, after_s = job
        while not left(body, after_s):  # the whole answer had come by then
            after_s /= 2

    jobs = [(body, dice.uniform(0.01, 1.0)) for body in bodies]
    await asyncio.to_thread(at_once, leave, jobs)
    await asyncio.to_thread(pair.until_idle)
    assert pd_of(pair.prefill).held_requests == 0
    body = body_of(400, 99)
    found, _ = await ask(gateway, body)
    assert found.text == complete(pair.decode, body).text
    await asyncio.to_thread(pair.until_idle)
