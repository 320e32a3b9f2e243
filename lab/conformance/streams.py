"""Streams: every byte, in time, to an orderly end; and nothing goes on when the client has left."""

import asyncio
import json
import time
from typing import Any

from lab.conformance.case import BrokenError, case, need
from lab.conformance.dialects import disorder
from lab.conformance.mock import Script, events
from lab.conformance.rig import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Rig, body_of

_ABORT_S = 3.0
_HELD_S = 20.0
_SILENT_S = 20.0
_FILLED_S = 15.0
_TEXT = "你好，世界 🌍 — é"


def _texts(data: list[str]) -> list[str]:
    """The text of each event that has one."""
    found = []
    for each in data:
        if each == "[DONE]":
            continue
        choices = json.loads(each).get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        found.append(delta.get("content") or choices[0].get("text") or "")
    return [text for text in found if text]


@case("stream-complete", seen="production-stack #952")
async def complete(rig: Rig) -> None:
    """A stream has all its pieces and ends with [DONE], chat and text."""
    for path in (CHAT, COMPLETIONS):
        answer = await rig.ask(rig.script(chunks=20), path, extra={"stream": True})
        data = answer.events()
        need(data and data[-1] == "[DONE]", f"{path}: it ends with {data[-1:]}")
        need(_texts(data) == [f"tok{number}" for number in range(20)], f"{path}: pieces are missing or out of order")


@case("stream-bytes-split", seen="api7/aisix #111, praxis #739")
async def split(rig: Rig) -> None:
    """Events cut into 7-byte writes, within characters, with CRLF or without a space, come out with the same data."""
    for how in ({}, {"end": "\r\n\r\n"}, {"lead": "data:"}):
        fields: dict[str, Any] = {"text": _TEXT, "split": 7, "chunks": 5, **how}
        script = rig.script(**fields)
        answer = await rig.ask(script, extra={"stream": True})
        texts = _texts(answer.events())
        need(texts == [f"{_TEXT}{number}" for number in range(5)], f"{how or 'split'}: got {texts[:2]}...")


@case("stream-bytes-identical", seen="-")
async def identical(rig: Rig) -> None:
    """A stream whose client asked for its usage comes out byte for byte as the backend sent it."""
    script = rig.script(text=_TEXT, chunks=4)
    extra = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await rig.ask(script, extra=extra)
    need(answer.body == b"".join(events(CHAT, body_of(script, CHAT, extra), script)), "the bytes differ")


@case("stream-is-not-buffered", seen="production-stack #952")
async def unbuffered(rig: Rig) -> None:
    """The first piece arrives long before the last is made."""
    began_s = time.monotonic()
    async with rig.streaming(rig.script(chunks=5, chunk_s=0.4)) as answer:
        await answer.content.readany()
        first_s = time.monotonic() - began_s
    need(first_s < 1.5, f"the first piece of a stream of 2 s came after {first_s:.1f} s")


@case("head-comes-at-once", seen="-")
async def head(rig: Rig) -> None:
    """The head of a stream that a backend has begun reaches the client long before the first event."""
    began_s = time.monotonic()
    async with rig.streaming(rig.script(head_s=_SILENT_S)) as answer:
        took_s = time.monotonic() - began_s
        need(answer.status == 200, f"got {answer.status}")
    need(took_s < _SILENT_S / 2, f"a head that the backend sent at once came after {took_s:.1f} s")


@case("silence-is-filled", seen="-")
async def silence(rig: Rig) -> None:
    """While a backend is silent for 20 s, before or within its stream, the client gets something within 15 s."""
    before, within = rig.script(ttft_s=_SILENT_S), rig.script(chunks=2, chunk_s=_SILENT_S)
    most_s = max(await asyncio.gather(_longest_pause(rig, before, b"tok0"), _longest_pause(rig, within, b"tok1")))
    need(most_s < _FILLED_S, f"nothing came for {most_s:.0f} s")


async def _longest_pause(rig: Rig, script: Script, until: bytes) -> float:
    """Read a stream until this has come; return the longest time in which nothing came."""
    longest_s, got, came_s = 0.0, b"", time.monotonic()
    async with rig.streaming(script) as answer:
        while until not in got:
            data = await answer.content.readany()
            need(data, "the stream ends before its backend has answered")
            before_s, came_s = came_s, time.monotonic()
            longest_s = max(longest_s, came_s - before_s)
            got += data
    return longest_s


@case("death-behind-the-head", seen="-")
async def behind_head(rig: Rig) -> None:
    """A backend that dies behind the head of its stream, before the first event, is replaced, or its client is told."""
    answer = await rig.ask(rig.script(head_only=True), extra={"stream": True})
    told = answer.status >= 500 or any('"error"' in each for each in answer.events())
    need(told, f"both backends died, and the client got {answer.shown()}")


@case("done-is-the-end", seen="-")
async def done(rig: Rig) -> None:
    """A stream is over at its [DONE] also where its backend leaves the connection open, which is let go of then."""
    script = rig.script(hold_s=_HELD_S)
    answer = await rig.ask(script, extra={"stream": True})
    need(answer.events()[-1:] == ["[DONE]"], f"it ends with {answer.events()[-1:]}")
    need(answer.seconds < _HELD_S / 2, f"its end came {answer.seconds:.1f} s later")
    need(await _aborted(rig, script), f"the backend's connection is still held after {_ABORT_S:.0f} s")


@case("usage-only-when-asked", seen="litellm #8349 #23847, llm-d-router #2437")
async def usage(rig: Rig) -> None:
    """A client that asked for usage gets it in the last piece; one that didn't gets no piece of usage."""
    asked = await rig.ask(rig.script(), extra={"stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(asked.events()[-2])
    need((last.get("usage") or {}).get("completion_tokens") == 3, f"asked for, but the last piece is {last}")
    silent = await rig.ask(rig.script(), extra={"stream": True})
    extra = [each for each in silent.events() if each != "[DONE]" and not json.loads(each)["choices"]]
    need(not extra, f"not asked for, but there is {extra[0] if extra else ''}")


@case("death-mid-stream-says-so", seen="smg #1682, vllm-router, lmdeploy proxy")
async def death(rig: Rig) -> None:
    """When a backend dies within a stream, the client gets what there was, an error event, and [DONE]."""
    try:
        answer = await rig.ask(rig.script(chunks=6, die_after=3), extra={"stream": True})
    except Exception as cut:
        raise BrokenError(f"the connection just ends: {type(cut).__name__}") from cut
    data = answer.events()
    need(data and data[-1] == "[DONE]", f"it ends with {data[-1:]}")
    try:
        error = json.loads(data[-2])["error"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise BrokenError(f"no error event before the end, but {data[-2:-1]}") from None
    need(isinstance(error, dict) and error.get("message"), f"the error event says {error!r}")
    need(_texts(data[:-2]) == ["tok0", "tok1", "tok2"], "pieces from before the death are missing")


@case("error-continues-its-stream", seen="-")
async def continued(rig: Rig) -> None:
    """A stream of Responses or Messages that was cut is continued in order: its numbers, its open items, its end."""
    for path in (RESPONSES, MESSAGES):
        for after in range(1, 8):
            answer = await rig.ask(rig.script(chunks=4, die_after=after), path, extra={"stream": True})
            wrong = disorder(answer.body.decode("utf-8", "replace"))
            need(wrong is None, f"{path}, cut after {after} events: {wrong}")


@case("stream-whole-without-done", seen="-")
async def without_done(rig: Rig) -> None:
    """A stream whose last chunk has its finish_reason is whole: where [DONE] is missing it is added, and no error."""
    answer = await rig.ask(rig.script(done=False), extra={"stream": True})
    data = answer.events()
    need(_texts(data) == ["tok0", "tok1", "tok2"], f"its chunks are {_texts(data)}")
    need(b'"error"' not in answer.body, f"it ends with an error: {data[-2:]}")
    need(data[-1] == "[DONE]", f"it ends with {data[-1:]}")


@case("stream-of-any-type", seen="-")
async def other_types(rig: Rig) -> None:
    """A stream of events that its backend calls something else is passed on as it comes."""
    for kind in ("text/plain", "application/octet-stream"):
        began_s = time.monotonic()
        async with rig.streaming(rig.script(chunks=5, chunk_s=0.4, kind=kind)) as answer:
            await answer.content.readany()
            first_s = time.monotonic() - began_s
        need(first_s < 1.5, f"{kind}: the first piece of a stream of 2 s came after {first_s:.1f} s")


async def _aborted(rig: Rig, script: Script) -> bool:
    return await rig.until(lambda: any(each.aborted_s for each in rig.seen(script)), _ABORT_S)


async def _leave(rig: Rig, script: Script, *, stream: bool) -> None:
    """Send a request and go away once a backend has it."""
    body = json.dumps(body_of(script, CHAT, {"stream": stream})).encode()
    task = asyncio.create_task(rig.post(CHAT, body))
    arrived = await rig.until(lambda: rig.seen(script), 10)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    need(arrived, "the request never reached a backend")


@case("leave-before-first-token", seen="sglang #11399 #19524 #39461, smg #2136, aibrix #1246")
async def leave_early(rig: Rig) -> None:
    """A client that leaves a stream before its first token ends the backend's work."""
    script = rig.script(ttft_s=30)
    await _leave(rig, script, stream=True)
    need(await _aborted(rig, script), f"the backend still works after {_ABORT_S:.0f} s")


@case("leave-whole-answer", seen="lmdeploy proxy")
async def leave_whole(rig: Rig) -> None:
    """A client that leaves while it waits for a whole answer ends the backend's work."""
    script = rig.script(ttft_s=30)
    await _leave(rig, script, stream=False)
    need(await _aborted(rig, script), f"the backend still works after {_ABORT_S:.0f} s")


@case("leave-mid-stream", seen="-")
async def leave_late(rig: Rig) -> None:
    """A client that leaves within a stream ends the backend's work."""
    script = rig.script(chunks=200, chunk_s=0.1)
    async with rig.streaming(script) as answer:
        await answer.content.readany()
    need(await _aborted(rig, script), f"the backend still works after {_ABORT_S:.0f} s")


CASES = (
    complete,
    split,
    identical,
    unbuffered,
    head,
    silence,
    behind_head,
    done,
    usage,
    death,
    continued,
    leave_early,
    leave_whole,
    leave_late,
    without_done,
    other_types,
)
