"""Who leaves when, at an instance that holds prompts: LMDeploy's stop and end of a session in either order."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engines.lmdeploy.pd import part as pd
from engines.lmdeploy.pd.holds import Holds
from kvcontrol.core.pd import Ticket

A = Ticket("a" * 32)


class Engine:
    """LMDeploy's ``Engine`` in what its sessions go through, with the hooks around it."""

    def __init__(self, sessions: Iterable[int]) -> None:
        self.held = set(sessions)
        self.alive = set(self.held)
        self.holds = Holds(self, lease_s=3600.0)
        self.scheduler = SimpleNamespace(get_session=self._session)
        self.kvgate_pd_part = SimpleNamespace(prefill=SimpleNamespace(holds=self.holds))

    def _session(self, session_id: int) -> Any:
        if session_id not in self.alive:
            return None
        return SimpleNamespace(sequences={0: SimpleNamespace(preserve_cache=True)})

    def is_held(self, session_id: int) -> bool:
        return session_id in self.held

    def blocks(self, session_id: int) -> int:
        return int(session_id in self.alive)

    def end(self, session_id: int) -> None:
        self.end_session(session_id)

    def end_session(self, session_id: int) -> bool:
        def original(_: Any, session_id: int) -> bool:
            self.alive.discard(session_id)
            self.held.discard(session_id)
            return True

        return pd.end_session(original)(self, session_id)

    def _response(self, *_: Any) -> None:
        """Nobody listens."""

    def client_is_done(self, session_id: int) -> None:
        pd.on_end_session(lambda *_, **__: None)(self, [Request.of(session_id)])

    def client_has_left(self, session_id: int) -> None:
        def original(engine: Any, requests: list[Any], **_: Any) -> None:
            for each in requests:
                engine.held.discard(each.data["session_id"])  # LMDeploy: STOPPED, blocks and all

        pd.on_stop_session(original)(self, [Request.of(session_id)])


@dataclass
class Request:
    data: dict[str, Any]
    resp: Any = field(default=None)

    @classmethod
    def of(cls, session_id: int) -> "Request":
        return cls({"session_id": session_id})


@pytest.mark.parametrize("order", ["leaves, ends", "ends, leaves"])
async def test_a_client_that_leaves_leaves_nothing_until_the_end_of_a_lease(order: str) -> None:
    engine = Engine({1, 2})
    assert engine.holds.expect(A, 1)
    if order == "leaves, ends":
        engine.client_has_left(1)
    engine.client_is_done(1)
    if order == "ends, leaves":
        assert engine.alive == {1, 2}, "its lease has begun"
        engine.client_has_left(1)
    await asyncio.sleep(0)
    assert engine.alive == {2}
    assert (engine.holds.counts.released, len(engine.holds)) == (1, 0)


async def test_blocks_that_are_read_stay_until_they_are_read() -> None:
    engine = Engine({1})
    assert engine.holds.expect(A, 1)
    engine.client_is_done(1)
    engine.holds.begin(A)
    engine.client_has_left(1)
    assert engine.alive == {1}
    assert not engine.holds.still(A)
    engine.holds.end(A, taken=False)
    assert engine.alive == set()


async def test_who_stops_a_session_that_nobody_holds_ends_it_himself() -> None:
    engine = Engine({2})
    engine.client_has_left(2)
    assert engine.alive == {2}
