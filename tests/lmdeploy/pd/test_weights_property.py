"""Weights that change at either of two instances, before, between and beside the legs of a prompt that is handed over:
nothing that was computed before is handed over afterwards, and every answer is of the weights of the instance that
gives it.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.lmdeploy.agent import loop_started
from engines.lmdeploy.pd import block_wire, wire
from engines.lmdeploy.pd.wire import Connection, TransferError
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import chain_hashes, root_hash, token_bytes
from kvcontrol.core.pd import Fetch, Hold, Load, PdStats, Save, Ticket, new_ticket
from kvcontrol.core.roles import KVTransport
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.examples import examples
from tests.support.held_wire import HeldWire, held_wire
from tests.support.tiered_engine import BLOCK, PROMPTS
from tests.support.two_models import OTHERS, OURS, UNKNOWN, two_models, undisturbed_answers
from tests.support.weights import broken_after, read_weights, update_request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NEW_TOKENS = 12
_PART = "kvgate_pd"
_POLL_S = 0.002
_CALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What happens to the weights of the instance at one ``side``, ``when`` seen from the prompt that is handed over;
    beside it: once the instance that prefilled has sent so many bytes.
    """

    side: str
    way: str
    when: str
    prompt: int
    tensors: int
    at: int


@dataclass(slots=True)
class Side:
    """One of the two instances, and what its weights are."""

    engine: DisturbedEngine
    identity: CacheIdentity
    weights: str = OURS

    async def serve(self) -> None:
        """Let the other instance reach the engine, as a process of its own does."""
        loop_started(self.engine.local.engine)

    @property
    def pd(self) -> PdStats:
        stats = self.engine.agent.stats().pd
        assert stats is not None
        return stats


@dataclass(slots=True)
class Couple:
    """An instance that prefills and one that answers, between which prompts go over ``wire``."""

    prefill: Side
    answer: Side
    wire: HeldWire
    transport: KVTransport
    models: dict[str, dict[str, Any]]
    answers: dict[str, list[list[int]]]
    tickets: set[Ticket] = field(default_factory=set)
    gone: set[Ticket] = field(default_factory=set)
    """Tickets from before the last change of the instance that prefills."""

    @property
    def is_by_ticket(self) -> bool:
        return self.transport is KVTransport.MIGRATION

    # One prompt.

    async def computed(self, prompt: int) -> Fetch | Load:
        """Have a prompt prefilled, on the loop of its instance, and return where it can be had."""
        ticket = new_ticket()
        duty = Hold(ticket=ticket) if self.is_by_ticket else Save()
        ended = await self.prefill.engine.follow(PROMPTS[prompt], new_tokens=1, carrying={_PART: duty})
        assert ended.how in {"FINISH", "CANCEL"}
        self.tickets.add(ticket)
        if self.is_by_ticket:
            return Fetch(ticket=ticket, host="127.0.0.1", port=self.wire.port)
        return Load(host="127.0.0.1", port=self.wire.port)

    async def answered(self, prompt: int, source: Fetch | Load) -> Ended:
        return await self.answer.engine.follow(PROMPTS[prompt], new_tokens=NEW_TOKENS, carrying={_PART: source})

    def check(self, ended: Ended, prompt: int) -> None:
        """A whole answer is that of the answering instance's weights."""
        assert ended.how in {"FINISH", "CANCEL"}
        if ended.how == "FINISH" and self.answer.weights != UNKNOWN:
            assert ended.tokens == self.answers[self.answer.weights][prompt]

    def hand_over(self, prompt: int) -> None:
        source = self.prefill.engine.do(lambda: self.computed(prompt))
        self.check(self.answer.engine.do(lambda: self.answered(prompt, source)), prompt)

    def hand_over_once(self, prompt: int) -> None:
        """The same between equal instances, of which the second one takes what the first one has computed."""
        before = self.answer.pd
        self.hand_over(prompt)
        after = self.answer.pd
        late = after.recomputed.get("busy", 0) - before.recomputed.get("busy", 0)  # the machine stood still
        assert after.fetched + late == before.fetched + 1

    # A change.

    def side(self, change: Change) -> Side:
        return self.prefill if change.side == "prefill" else self.answer

    async def changed(self, change: Change) -> None:
        """Change the weights of one side, on its loop."""
        side, engine = self.side(change), self.side(change).engine
        if change.side == "prefill":
            self.gone |= self.tickets
        before = side.engine.agent.tracker.identity.revision
        match change.way:
            case "ours" | "others":
                side.weights = UNKNOWN
                await engine.update(update_request(self.models[change.way]))
                side.weights = change.way
            case "broken off":
                side.weights = UNKNOWN
                whole = self.models[OTHERS]
                with pytest.raises((AssertionError, RuntimeError)):  # it doesn't fit
                    await engine.update(update_request(broken_after(whole, [*whole][: change.tensors])))
            case "deep sleep":
                side.weights = UNKNOWN
                await engine.local.engine.sleep(2)
                engine.local.engine.wakeup(["weights"])
                await engine.update(update_request(self.models[OTHERS]))
                engine.local.engine.wakeup(["kv_cache"])
                side.weights = OTHERS
            case "sleep":  # which keeps the weights, and the names
                await engine.sleep_and_wake()
                return
            case way:
                raise AssertionError(way)
        assert side.engine.agent.tracker.identity.revision != before

    def run(self, change: Change) -> None:
        """Hand one prompt over, with a change on the way, and look what can be had afterwards."""
        side, prompt = self.side(change), change.prompt
        if change.when == "before":
            side.engine.do(lambda: self.changed(change))
        source = self.prefill.engine.do(
            lambda: self._while_computing(change) if change.when == "computing" else self.computed(prompt)
        )
        if change.when == "between":
            side.engine.do(lambda: self.changed(change))
        if change.when == "beside":
            ended = self.answer.engine.do(lambda: self._while_moving(change, source))
        else:
            ended = self.answer.engine.do(lambda: self.answered(prompt, source))
        if change.when == "beside" and change.side == "answer":
            assert ended.how in {"FINISH", "CANCEL"}  # its first token may be of the weights before
        else:
            self.check(ended, prompt)
        self.look(change)

    async def _while_computing(self, change: Change) -> Fetch | Load:
        """Change weights while the prompt is being computed where it is prefilled."""
        computing = asyncio.create_task(self.computed(change.prompt))
        if change.side == "prefill":
            await self.changed(change)
        else:
            await asyncio.to_thread(self.answer.engine.do, lambda: self.changed(change))
        return await computing

    async def _while_moving(self, change: Change, source: Fetch | Load) -> Ended:
        """Change weights while blocks are on the wire; the answering instance waits there for them to end or be given
        up.
        """
        self.wire.hold(change.at)
        asking = asyncio.create_task(self.answered(change.prompt, source))
        while not (self.wire.is_holding or asking.done()):
            await asyncio.sleep(_POLL_S)
        if change.side == "prefill":
            await asyncio.to_thread(self.prefill.engine.do, lambda: self.changed(change))
        else:
            changing = asyncio.create_task(self.changed(change))
            while self.is_by_ticket and not (self.answer.engine.agent.pauses.lock.locked() or changing.done()):
                await asyncio.sleep(_POLL_S)
            if not self.is_by_ticket:
                await changing
            self.wire.release()
            await changing
        self.wire.release()
        ended = await asking
        self.wire.hold(None)
        return ended

    def look(self, change: Change) -> None:
        """What the changed instance computed before can't be had, and the other's is not taken any more. Where it only
        slept, what lies below its pool can be had.
        """
        slept = change.way == "sleep"
        if change.side == "prefill" and (self.is_by_ticket or not slept):
            self._had_by_nobody()
        before = self.answer.pd.fetched
        for prompt in {change.prompt, (change.prompt + 1) % len(PROMPTS)}:
            self.hand_over(prompt)
        assert slept or self.answer.pd.fetched == before, "blocks of one instance's weights were taken by one of others"

    def _had_by_nobody(self) -> None:
        """Ask as a peer would for all that was computed: by name or by ticket, nothing of it is given out."""
        host, _, port = self.prefill.pd.endpoint.rpartition(":")
        for ask in self._asks():
            with _connected(host, int(port)) as connection, pytest.raises(TransferError, match=r"is here|is held"):
                ask(connection)

    def _asks(self) -> list[Callable[[Connection], Any]]:
        part = self.prefill.engine.agent.pd
        if self.is_by_ticket or part is None or part.tiers is None:
            return [partial(wire.ask, ticket=ticket) for ticket in self.gone]
        root = root_hash(self.prefill.identity)
        paths = []
        for tokens in PROMPTS:
            whole = token_bytes(tokens[: len(tokens) // BLOCK * BLOCK])
            keys: list[bytes] = [*chain_hashes(root, whole, BLOCK)]
            paths += [keys[first:] for first in range(0, len(keys), 7)]
        return [
            partial(block_wire.ask, wanted=block_wire.Wanted(layout=part.tiers.layout, keys=path)) for path in paths
        ]

    def restart(self) -> None:
        """Bring both to where they would be had they just been started from the first folder."""
        self.wire.hold(None)
        self.tickets.clear()
        self.gone.clear()
        for side in (self.prefill, self.answer):
            side.engine.do(lambda side=side: self._restart(side))

    async def _restart(self, side: Side) -> None:
        if side.weights != OURS:
            await side.engine.update(update_request(self.models[OURS]))
            side.weights = OURS
        agent = side.engine.agent
        agent.weights_changed()
        agent.tracker.rebase(side.identity)
        if agent.tiers is not None:
            agent.tiers.rebase(side.identity)


def _connected(host: str, port: int) -> Connection:
    return Connection(socket.create_connection((host, port), timeout=_CALL_S), deadline_s=time.monotonic() + _CALL_S)


@pytest.fixture(scope="module")
def models(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_models(tiny_llama, tmp_path_factory.mktemp("models") / "other")


@pytest.fixture(scope="module")
def answers(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    return undisturbed_answers(models, NEW_TOKENS)


@pytest.fixture(scope="module")
def _hooks(answers: object) -> Iterator[None]:
    del answers  # first, without hooks
    from engines.lmdeploy import hooks
    from engines.lmdeploy.patching import install

    undo = install(
        [
            *hooks.event_hooks(),
            *hooks.interruption_hooks(),
            *hooks.eviction_hooks(),
            *hooks.key_hooks(),
            *hooks.tenant_hooks(),
            *hooks.schedule_hooks(),
            *hooks.step_hooks(),
            *hooks.tier_hooks(),
            *hooks.usage_hooks(),
            *hooks.pd_hooks(),
        ]
    )
    yield
    undo()


@pytest.fixture(params=[KVTransport.MIGRATION, KVTransport.TIERS])
def couple(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    answers: dict[str, list[list[int]]],
    _hooks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Couple]:
    from lmdeploy.pytorch.disagg.config import EngineRole

    monkeypatch.setenv("KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S", "300")
    monkeypatch.setenv("KVGATE_ENGINE_PD_LEASE_S", "900")
    transport = KVTransport(request.param)
    if transport is KVTransport.TIERS:
        monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(64 << 20))
        monkeypatch.setenv("KVGATE_ENGINE_PD_TRANSPORT", "tiers")
        options: list[dict[str, Any]] = [{}, {}]
    else:
        options = [{"role": role, "enable_prefix_caching": False} for role in (EngineRole.Prefill, EngineRole.Decode)]
    with ExitStack() as stack:
        sides = []
        for more in options:
            engine = stack.enter_context(DisturbedEngine.start(models[OURS], num_gpu_blocks=96, **more))
            sides.append(Side(engine, engine.agent.tracker.identity))
        for side in sides:
            side.engine.local.runner.keep_running()
            side.engine.do(side.serve)
        host, _, port = sides[0].pd.endpoint.rpartition(":")
        wire = stack.enter_context(held_wire(host, int(port)))
        weights = {name: read_weights(folder) for name, folder in models.items()}
        yield Couple(sides[0], sides[1], wire, transport, weights, answers)
        assert all(side.engine.do(side.engine.is_alive) for side in sides)


changes = st.builds(
    Change,
    side=st.sampled_from(["prefill", "answer"]),
    way=st.sampled_from(["ours", "others", "others", "broken off", "deep sleep", "sleep"]),
    when=st.sampled_from(["before", "computing", "between", "beside", "beside"]),
    prompt=st.integers(0, len(PROMPTS) - 1),
    tensors=st.integers(0, 12),
    at=st.sampled_from([0, 1, 400, 5_000, 30_000, 100_000]),
)


def test_nothing_computed_with_earlier_weights_is_handed_over_whenever_they_change(couple: Couple) -> None:
    couple.restart()
    couple.hand_over_once(0)

    @settings(
        max_examples=examples(60, least=12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(before=st.lists(st.integers(0, len(PROMPTS) - 1), max_size=2, unique=True), change=changes)
    def holds(before: list[int], change: Change) -> None:
        couple.restart()
        for prompt in before:
            couple.hand_over_once(prompt)
        couple.run(change)

    holds()
