"""Backends that die, hang, flap and return; these run last, as some gateways need a minute to recover."""

import asyncio
import time

import aiohttp

from lab.conformance.case import case, need
from lab.conformance.mock import MODEL
from lab.conformance.rig import Answer, Rig

_RECOVERED_S = 3.0
_PATIENCE_S = 75.0
_DEADLINE_S = 45.0


async def _settled(rig: Rig) -> None:
    """Wait until both backends are used again, whatever a case before has left."""
    for backend in rig.backends:
        backend.silent = False
        await backend.stop()
        await backend.start()
    need(await rig.both_used(_PATIENCE_S) is not None, f"both backends are up, but not used for {_PATIENCE_S:.0f} s")


async def _ended(rig: Rig, limit_s: float) -> Answer | str:
    """Send one request; return its answer, or how it failed."""
    try:
        async with asyncio.timeout(limit_s):
            return await rig.ask(rig.script())
    except TimeoutError:
        return "hung"
    except aiohttp.ClientError as error:
        return type(error).__name__


@case("dead-backend-unnoticed", seen="dynamo #11646, llm-d-router #1738, aibrix #2287")
async def dead(rig: Rig) -> None:
    """With one of two backends gone, every request is answered by the other."""
    await _settled(rig)
    await rig.backends[0].stop()
    try:
        answers = [await _ended(rig, 30) for _ in range(20)]
    finally:
        await rig.backends[0].start()
    failed = [each for each in answers if isinstance(each, str) or each.status != 200]
    need(not failed, f"{len(failed)} of 20 failed, the first with {_shown(failed[:1])}")


@case("returned-backend-used", seen="sglang-router, vllm-router, smg: 58 s")
async def returned(rig: Rig) -> None:
    """A backend that returns is used again within 3 s."""
    await _settled(rig)
    await rig.backends[1].stop()
    for _ in range(12):
        await _ended(rig, 30)
    await rig.backends[1].start()
    took_s = await rig.both_used(_PATIENCE_S)
    need(took_s is not None, f"not within {_PATIENCE_S:.0f} s")
    need((took_s or 0) < _RECOVERED_S, f"it took {took_s:.1f} s")


@case("no-backend-503", seen="llm-d-router #2047 #1751 #1612")
async def nobody(rig: Rig) -> None:
    """Without any backend the answer is a 503 with an error object, not a 429, a 500 or a hang."""
    await _settled(rig)
    for backend in rig.backends:
        await backend.stop()
    try:
        answers = [await _ended(rig, 30) for _ in range(4)]
    finally:
        for backend in rig.backends:
            await backend.start()
    wrong = [each for each in answers if isinstance(each, str) or each.status != 503 or not each.error()]
    need(not wrong, f"got {_shown(wrong[:1])}")


@case("absence-is-temporary", seen="-")
async def absence(rig: Rig) -> None:
    """While all backends of a model are away, asking for the model or using it is no 404; a 503 names a Retry-After."""
    await _settled(rig)
    for backend in rig.backends:
        await backend.stop()
    try:
        used, named = await _ended(rig, 30), await rig.get(f"/v1/models/{MODEL}")
    finally:
        for backend in rig.backends:
            await backend.start()
    need(isinstance(used, Answer) and used.status == 503, f"a chat got {_shown([used])}")
    need(isinstance(used, Answer) and used.headers.get("retry-after", "").isdigit(), "its 503 has no Retry-After")
    need(named.status in {200, 503}, f"/v1/models/{MODEL} got {named.shown()}")


@case("silent-backend-harms-nobody", seen="production-stack #749")
async def silent(rig: Rig) -> None:
    """One backend takes requests and never answers: each request ends in 45 s, and half of them well."""
    await _settled(rig)
    rig.backends[0].silent = True
    try:
        answers = await asyncio.gather(*(_ended(rig, _DEADLINE_S) for _ in range(16)))
    finally:
        rig.backends[0].silent = False
    hung = sum(each == "hung" for each in answers)
    good = sum(isinstance(each, Answer) and each.status == 200 for each in answers)
    need(not hung, f"{hung} of 16 were not answered in {_DEADLINE_S:.0f} s")
    bad = [each for each in answers if isinstance(each, str) or each.status != 200]
    need(good >= 8, f"only {good} of 16 were answered well, the first other one with {_shown(bad[:1])}")


@case("flapping-backend", seen="dynamo #13088")
async def flapping(rig: Rig) -> None:
    """While a backend comes and goes, every request ends, and 9 of 10 well."""
    await _settled(rig)
    stop = asyncio.Event()

    async def flap() -> None:
        while not stop.is_set():
            await rig.backends[0].stop()
            await asyncio.sleep(0.7)
            await rig.backends[0].start()
            await asyncio.sleep(0.9)

    flapping_task = asyncio.create_task(flap())
    began_s = time.monotonic()
    answers: list[Answer | str] = []
    try:
        while time.monotonic() - began_s < 6:
            answers += await asyncio.gather(*(_ended(rig, 30) for _ in range(8)))
    finally:
        stop.set()
        await flapping_task
    hung = sum(each == "hung" for each in answers)
    good = sum(isinstance(each, Answer) and each.status == 200 for each in answers)
    need(not hung, f"{hung} of {len(answers)} hung")
    need(good >= 0.9 * len(answers), f"only {good} of {len(answers)} were answered well")


def _shown(answers: list[Answer | str]) -> str:
    return ", ".join(each if isinstance(each, str) else each.shown() for each in answers)


CASES = (dead, returned, nobody, absence, silent, flapping)
