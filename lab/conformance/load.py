"""Many requests at once: none waits for another's connection, both backends work, nothing stays counted."""

import asyncio
import contextlib
import time
from typing import Any

import aiohttp

from lab.conformance.case import case, need
from lab.conformance.mock import Script
from lab.conformance.rig import MESSAGES, Rig

_STREAMS = 400
_MANY = 300
_LEFT = 100
_ENDLESS = 24
_LEAST_OF_ENDLESS = 6


async def _ok(rig: Rig, script: Script) -> bool:
    try:
        return (await rig.ask(script)).status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


@case("no-connection-limit", seen="production-stack #767")
async def no_limit(rig: Rig) -> None:
    """300 requests of 4 s each run at once, not 100 after 100."""
    began_s = time.monotonic()
    done = await asyncio.gather(*(_ok(rig, rig.script(ttft_s=4.0)) for _ in range(_MANY)))
    took_s = time.monotonic() - began_s
    need(all(done), f"{done.count(False)} of {_MANY} failed")
    need(took_s < 10, f"{_MANY} requests of 4 s took {took_s:.1f} s")


@case("many-open-streams", seen="production-stack #448")
async def many_streams(rig: Rig) -> None:
    """With 400 streams open, 50 new requests are answered."""
    async with contextlib.AsyncExitStack() as stack:
        opened = await asyncio.gather(
            *(stack.enter_async_context(rig.streaming(rig.script(chunks=400, chunk_s=0.5))) for _ in range(_STREAMS)),
            return_exceptions=True,
        )
        failed = [each for each in opened if isinstance(each, BaseException) or each.status != 200]
        need(not failed, f"{len(failed)} of {_STREAMS} streams did not open: {failed[:1]}")
        done = await asyncio.gather(*(_ok(rig, rig.script()) for _ in range(50)))
        need(all(done), f"{done.count(False)} of 50 requests failed beside them")
    need(await rig.until(lambda: rig.active == 0, 20), f"{rig.active} streams go on after their clients left")


@case("burst-spreads", seen="sglang #27547 #15473, smg #1714")
async def burst(rig: Rig) -> None:
    """Of 40 long prompts that arrive at once each backend gets a quarter: load counts from the decision on."""
    scripts = [rig.script(ttft_s=2.0, text=f"burst{number}") for number in range(40)]
    extra = [{"messages": [{"role": "user", "content": each.prompt() + each.id * 400}]} for each in scripts]
    await asyncio.gather(*(rig.ask(each, extra=more) for each, more in zip(scripts, extra, strict=True)))
    served = [rig.served_by(each) for each in scripts]
    counts = {backend.name: served.count(backend.name) for backend in rig.backends}
    need(min(counts.values()) >= 10, f"they went {counts}")


@case("cold-goes-to-the-idle", seen="sglang #14532")
async def cold(rig: Rig) -> None:
    """New prompts go to the backend with less to do, not to the one with fewer prompts seen."""
    async with contextlib.AsyncExitStack() as stack:
        busy: dict[str, int] = {backend.name: 0 for backend in rig.backends}
        for _ in range(_ENDLESS):
            script = rig.script(chunks=100, chunk_s=0.5)
            answer = await stack.enter_async_context(rig.streaming(script))
            await answer.content.readany()
            busy[rig.served_by(script)] += 1
        need(min(busy.values()) >= _LEAST_OF_ENDLESS, f"{_ENDLESS} endless streams went {busy}")


@case("chat-with-image-stays", seen="-")
async def sticking(rig: Rig) -> None:
    """The turns of a chat that begins with an image stay at one backend wherever those of a chat of text do."""
    text, image = [await _at(rig, opaque=each) for each in (False, True)]
    if image > max(text, 1):  # a machine that stands still for a moment takes a backend out: look again
        image = min(image, await _at(rig, opaque=True))
    need(image <= max(text, 1), f"a chat of text was at {text} backend(s), one that begins with an image at {image}")


async def _at(rig: Rig, *, opaque: bool) -> int:
    """Hold four chats at once; return at how many backends the turns of one were at most."""
    scripts = [rig.script() for _ in range(4)]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6000}}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": [{"type": "text", "text": each.prompt()}, *([image] if opaque else [])]}]
        for each in scripts
    ]
    at: list[set[str]] = [set() for _ in scripts]
    for turn in range(5):
        for script, messages, names in zip(scripts, chats, at, strict=True):
            await rig.ask(script, extra={"messages": messages})
            names.add(rig.served_by(script))
            messages += [
                {"role": "assistant", "content": f"answer {turn} " * 200},
                {"role": "user", "content": f"turn {turn} " * 200},
            ]
    return max(map(len, at))


@case("chat-with-inline-system-stays", seen="-")
async def inline_system(rig: Rig) -> None:
    """So do those of a chat on Messages that has a system message among the others."""
    text, inline = [await _at_messages(rig, inline=each) for each in (False, True)]
    if inline > max(text, 1):
        inline = min(inline, await _at_messages(rig, inline=True))
    need(inline <= max(text, 1), f"a plain chat was at {text} backend(s), one with a system message within at {inline}")


async def _at_messages(rig: Rig, *, inline: bool) -> int:
    """Hold four chats on Messages; return at how many backends the turns of one were at most."""
    scripts = [rig.script() for _ in range(4)]
    chats = [[{"role": "user", "content": each.prompt()}] for each in scripts]
    at: list[set[str]] = [set() for _ in scripts]
    for turn in range(5):
        for script, messages, names in zip(scripts, chats, at, strict=True):
            await rig.ask(script, MESSAGES, extra={"messages": messages})
            names.add(rig.served_by(script))
            messages.append({"role": "assistant", "content": f"answer {turn} " * 200})
            if inline:
                messages.append({"role": "system", "content": f"note {turn}"})
            messages.append({"role": "user", "content": f"turn {turn} " * 200})
    return max(map(len, at))


@case("nothing-stays-counted", seen="production-stack #1001 #1072, smg #2064")
async def counters(rig: Rig) -> None:
    """After 100 clients that left and 40 errors, both backends are used as before: no load was left counted."""

    async def leave() -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(0.4):
                await rig.ask(rig.script(ttft_s=20))

    await asyncio.gather(*(leave() for _ in range(_LEFT)), *(rig.ask(rig.script(status=500)) for _ in range(40)))
    need(await rig.until(lambda: rig.active == 0, 10), f"{rig.active} requests go on at the backends")
    scripts = [rig.script(text=f"after{number}", ttft_s=0.1) for number in range(40)]
    for start in range(0, len(scripts), 8):
        await asyncio.gather(*(rig.ask(each) for each in scripts[start : start + 8]))
    served = [rig.served_by(each) for each in scripts]
    counts = {backend.name: served.count(backend.name) for backend in rig.backends}
    need(min(counts.values()) >= 10, f"40 requests after it, 8 at once, went {counts}")


@case("labels-bounded", seen="llm-d-router #1909 #2119, smg #1679, kthena #1378, sglang #31193")
async def labels(rig: Rig) -> None:
    """200 invented models and paths add no series to /metrics."""
    await rig.ask(rig.script(), extra={"model": "invented"})
    await rig.get("/v1/invented")
    before = await _series(rig)
    if before is None:
        return  # nothing to count: its metrics are elsewhere
    for number in range(100):
        await rig.ask(rig.script(), extra={"model": f"invented-{number}"})
        await rig.get(f"/v1/invented-{number}")
    after = await _series(rig) or 0
    need(after <= before + 5, f"{after - before} series more")


async def _series(rig: Rig) -> int | None:
    answer = await rig.get("/metrics")
    if answer.status != 200:
        return None
    return sum(1 for line in answer.body.splitlines() if line and not line.startswith(b"#"))


CASES = (no_limit, many_streams, burst, cold, sticking, inline_system, counters, labels)
