"""Runs the cases against a target and gathers what each found."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from lab.conformance import answers, bodies, clients, edge, ending, failures, load, streams, wire
from lab.conformance.case import BrokenError, Case
from lab.conformance.mock import MockBackend
from lab.conformance.rig import Rig

CASES: tuple[Case, ...] = (
    *bodies.CASES,
    *answers.CASES,
    *streams.CASES,
    *wire.CASES,
    *edge.CASES,
    *clients.CASES,
    *load.CASES,
    *failures.CASES,
    *ending.CASES,
)
_LONGEST_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``why`` is what the target did instead, empty where the case holds."""

    id: str
    ok: bool
    why: str


class UnreachableError(Exception):
    """No request has come through the target to both backends."""


def make_rig(target: str, ports: Sequence[int], session: aiohttp.ClientSession) -> Rig:
    """Return a rig whose two backends are not listening yet."""
    return Rig(target, (MockBackend("a", ports[0]), MockBackend("b", ports[1])), session)


def make_session() -> aiohttp.ClientSession:
    """Return a session that limits nothing: what limits there are shall be the target's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
    )


async def run(  # noqa: PLR0913 - called at one place, by name
    target: str,
    ports: Sequence[int],
    *,
    cases: Sequence[Case] = CASES,
    wait_s: float,
    say: Callable[[str], None],
    pid: int | None = None,
) -> list[Outcome]:
    """Start the backends, wait for the target to use both, and run the cases in order; ``pid`` is the target's process,
    for those that end it.

    Raises ``UnreachableError`` when it doesn't within ``wait_s``.
    """
    async with make_session() as session:
        rig = make_rig(target, ports, session)
        rig.pid = pid
        for backend in rig.backends:
            await backend.start()
        try:
            if await rig.both_used(wait_s) is None:
                raise UnreachableError(
                    f"in {wait_s:.0f} s no request came through {target} to both backends on ports "
                    f"{ports[0]} and {ports[1]}"
                )
            return await _run(rig, cases, say)
        finally:
            for backend in rig.backends:
                await backend.stop()


async def _run(rig: Rig, cases: Sequence[Case], say: Callable[[str], None]) -> list[Outcome]:
    waiting = {each.id: asyncio.create_task(outcome_of(each, rig)) for each in cases if each.background}
    found: dict[str, Outcome] = {}

    async def ask(case: Case) -> None:
        began_s = time.monotonic()
        found[case.id] = await outcome_of(case, rig)
        say(f"{_mark(found[case.id])} ({time.monotonic() - began_s:.1f} s)")

    try:
        for each in cases:
            if not each.background and not each.ends_target:
                await ask(each)
        for identity, task in waiting.items():
            found[identity] = await task
            say(_mark(found[identity]))
        for each in cases:
            if each.ends_target:
                await ask(each)
    finally:
        for task in waiting.values():
            task.cancel()
    return [found[each.id] for each in cases]


def _mark(outcome: Outcome) -> str:
    return f"ok     {outcome.id}" if outcome.ok else f"BROKEN {outcome.id}: {outcome.why}"


async def outcome_of(case: Case, rig: Rig) -> Outcome:
    """Run one case; whatever goes wrong in it is the target's failure, said in ``why``."""
    try:
        async with asyncio.timeout(_LONGEST_S):
            await case.check(rig)
    except BrokenError as error:
        return Outcome(id=case.id, ok=False, why=str(error))
    except TimeoutError:
        return Outcome(id=case.id, ok=False, why="it hung")
    except Exception as error:  # noqa: BLE001 - a target may do anything, and the other cases shall run
        return Outcome(id=case.id, ok=False, why=f"{type(error).__name__}: {error}")
    return Outcome(id=case.id, ok=True, why="")
