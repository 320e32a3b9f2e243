"""Readings of held prompts while the engine's thread is busy for longer than anybody waits."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.pd import prefill as pd_prefill
from engines.lmdeploy.pd.holds import Holds
from engines.lmdeploy.pd.prefill import PdPrefill
from engines.lmdeploy.pd.wire import TransferError
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.pd import Ticket
from tests.support.processes import eventually

A = Ticket("a" * 32)
LONGEST_S = 60.0


class Sessions:
    """One that is held, until it is ended."""

    def __init__(self) -> None:
        self.alive = {1}

    def is_held(self, session_id: int) -> bool:
        return session_id in self.alive

    def end(self, session_id: int) -> None:
        self.alive.discard(session_id)

    def blocks(self, session_id: int) -> int:
        return int(session_id in self.alive)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The engine's, on its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONGEST_S)
    loop.close()


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def prefill(
    loop: asyncio.AbstractEventLoop, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PdPrefill]:
    monkeypatch.setattr(pd_prefill, "_CALL_S", 0.05)
    calls = EngineCalls()
    calls.attach(loop)
    made = PdPrefill(SimpleNamespace(), EngineSettings(), calls, epoch="e", identity=_unasked, serves=False)
    made.holds = Holds(sessions, lease_s=LONGEST_S)
    assert made.holds.expect(A, 1)
    yield made
    made.close()


def _unasked() -> Any:
    raise AssertionError("nobody asks who it is")


def test_a_reading_that_ends_while_the_engine_is_busy_ends_all_the_same(
    prefill: PdPrefill, sessions: Sessions, loop: asyncio.AbstractEventLoop
) -> None:
    prefill.holds.begin(A)
    idle = threading.Event()
    loop.call_soon_threadsafe(idle.wait, LONGEST_S)
    prefill.end(A, taken=True)
    assert sessions.alive == {1}
    idle.set()
    eventually(lambda: not sessions.alive, LONGEST_S, "the end of the session")


def test_a_reading_that_begins_when_nobody_waits_for_it_any_more_is_none(
    prefill: PdPrefill, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = threading.Event()
    monkeypatch.setattr(prefill, "_describe", lambda _: idle.wait(LONGEST_S))
    with pytest.raises(TransferError) as busy:
        prefill.begin(A)
    assert busy.value.cause == "busy"
    assert prefill.holds.must_wait(1), "it is being read"
    idle.set()
    eventually(lambda: not sessions.alive, LONGEST_S, "the end of the session")
