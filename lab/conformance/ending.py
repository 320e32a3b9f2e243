"""A gateway that is stopped: who is cut off by that reads of it. These cases end the target, and run last."""

import asyncio
import json
import os
import signal

import aiohttp

from lab.conformance.bodies import is_envelope
from lab.conformance.case import case, need
from lab.conformance.rig import Answer, Rig

_PATIENCE_S = 90.0
"""Grace periods of up to a minute are usual."""
_UNDER_WAY_S = 0.5


@case("stop-signal-ends-in-words", seen="kvgate: no error event, 500 in plain text", ends_target=True)
async def stopped(rig: Rig) -> None:
    """After SIGTERM a stream that outlasts the grace period ends with an error event, a whole answer with an error."""
    assert rig.pid is not None  # noqa: S101 - the case is left out otherwise
    async with rig.streaming(rig.script(chunks=100_000, chunk_s=0.5)) as stream:
        begun = await stream.content.readany()
        whole = asyncio.create_task(rig.ask(rig.script(ttft_s=600.0)))
        try:
            await asyncio.sleep(_UNDER_WAY_S)
            os.kill(rig.pid, signal.SIGTERM)
            async with asyncio.timeout(_PATIENCE_S):
                rest = await stream.content.read()
                answer = await whole
        except aiohttp.ClientError as error:
            need(False, f"it was cut off: {type(error).__name__}: {error}")  # noqa: FBT003 - the condition never holds
            return
        finally:
            whole.cancel()
    need(answer.status in {502, 503, 504} and is_envelope(answer), f"a whole answer became {answer.shown()}")
    events = Answer(200, {}, begun + rest, 0.0).events()
    last = events[-2] if events[-1:] == ["[DONE]"] else events[-1]
    need("error" in json.loads(last), f"a stream ended with {last[:120]!r}")


CASES = (stopped,)
