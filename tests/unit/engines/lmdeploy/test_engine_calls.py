import asyncio
import threading

import pytest

from engines.control.calls import EngineBusyError
from engines.lmdeploy.engine_calls import EngineCalls


async def test_a_call_runs_on_the_loops_thread_and_returns_its_answer() -> None:
    calls = EngineCalls()
    calls.attach(asyncio.get_running_loop())
    here = threading.get_ident()
    assert await asyncio.to_thread(calls, threading.get_ident, timeout_s=20) == here


async def test_what_a_call_raises_is_raised_where_it_was_asked_for() -> None:
    calls = EngineCalls()
    calls.attach(asyncio.get_running_loop())

    def fail() -> None:
        raise KeyError("no such block")

    with pytest.raises(KeyError, match="no such block"):
        await asyncio.to_thread(calls, fail, timeout_s=20)


async def test_a_loop_that_does_not_get_to_it_is_busy_and_the_call_never_runs() -> None:
    calls = EngineCalls()
    calls.attach(asyncio.get_running_loop())
    ran: list[int] = []
    raised: list[str] = []

    def ask() -> None:
        try:
            calls(lambda: ran.append(1), timeout_s=0.05)
        except EngineBusyError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(20)  # the loop's own thread: it can't get to the call meanwhile
    await asyncio.sleep(0)
    assert raised == ["the engine's loop did not get to the call within 0.05 s"]
    assert ran == []


def test_before_and_after_the_loop_is_an_error_not_a_wait() -> None:
    calls = EngineCalls()
    with pytest.raises(EngineBusyError, match="has not started"):
        calls(int, timeout_s=20)
    loop = asyncio.new_event_loop()
    calls.attach(loop)
    loop.close()
    with pytest.raises(EngineBusyError, match="has ended"):
        calls(int, timeout_s=20)
