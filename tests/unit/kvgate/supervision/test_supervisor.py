import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvgate.failure import CommandError
from kvgate.supervision.child import Child, ChildFailedError, ChildSpec, describe_exit, last_lines
from kvgate.supervision.supervisor import TRIES, State, Supervisor

LIMIT_S = 60.0
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('child', child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def spec(name: str, code: str, *, start_limit_s: float = LIMIT_S) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", textwrap.dedent(code)),
        environment=dict(os.environ),
        ready_url=name,
        start_limit_s=start_limit_s,
    )


def logged(folder: Path, text: str) -> Callable[[str], object]:
    """A probe: a child is ready when its log has ``text``."""

    async def probe(name: str) -> bool:
        return text in (folder / f"{name}.log").read_text()

    return probe


def quiet(_child: str, _state: State, _elapsed_s: float) -> None:
    """Watch nothing."""


async def gone(pid: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def text_in(log: Path, text: str) -> str:
    async with asyncio.timeout(LIMIT_S):
        while text not in (log.read_text() if log.exists() else ""):
            await asyncio.sleep(0.05)
    return log.read_text()


async def test_children_are_started_reported_ready_and_stopped(tmp_path: Path) -> None:
    seen: list[tuple[str, State]] = []
    stages = [[spec("a", SLEEPER), spec("b", SLEEPER)], [spec("c", SLEEPER)]]
    watcher = lambda child, state, _: seen.append((child, state))  # noqa: E731
    async with Supervisor(stages, tmp_path, logged(tmp_path, "up"), watcher) as children:
        await children.until_ready()
        pids = [child.pid for child in children.children]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [child for child, state in seen if state is State.STARTING] == ["a", "b", "c"]
    assert {child for child, state in seen if state is State.READY} == {"a", "b", "c"}
    assert [child for child, state in seen if state is State.STOPPING] == ["c", "a", "b"], "the last stage goes first"


async def test_a_child_that_dies_while_starting_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = spec("engine-1", "print('loading'); raise SystemExit('no such weights')")
    with pytest.raises(ChildFailedError) as failure:
        async with Supervisor(
            [[spec("engine-0", SLEEPER), broken]], tmp_path, logged(tmp_path, "never"), quiet
        ) as children:
            await children.until_ready()
    assert failure.value.child == "engine-1"
    assert "engine-1 ended with exit code 1" in failure.value.message
    assert "no such weights" in failure.value.message
    assert str(tmp_path / "engine-1.log") in failure.value.advice
    assert not any(psutil.pid_exists(child.pid) for child in children.children), "the others are stopped too"


async def test_a_child_that_is_killed_later_starts_again_and_nothing_it_started_is_left(tmp_path: Path) -> None:
    ends: list[ChildFailedError] = []
    ready: list[str] = []

    def watch(child: str, state: State, _elapsed_s: float) -> None:
        if state is State.READY:
            ready.append(child)

    stages = [[spec("engine-0", PARENT), spec("engine-1", SLEEPER)]]
    async with Supervisor(stages, tmp_path, logged(tmp_path, ""), watch, first_pause_s=0.01) as children:
        await children.until_ready()
        grandchild = int((await text_in(tmp_path / "engine-0.log", "child")).split()[1])
        kept = asyncio.ensure_future(children.keep(lambda ended, _: ends.append(ended)))
        (killed, other) = (child.pid for child in children.children)
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while ready.count("engine-0") < 2:
                await asyncio.sleep(0.02)
        await gone(grandchild)
        assert [each.what for each in ends] == ["was killed by SIGKILL (out of memory?)"]
        again, same = (child.pid for child in children.children)
        assert again != killed
        assert same == other
        kept.cancel()
    assert not psutil.pid_exists(again)


async def test_a_child_that_runs_and_no_longer_answers_starts_again(tmp_path: Path) -> None:
    ends: list[ChildFailedError] = []
    stuck: set[str] = set()
    children_of = [
        replace(spec("engine-0", STUBBORN), alive_url="alive-0", silent_tries=3),
        replace(spec("engine-1", SLEEPER), alive_url="alive-1", silent_tries=3),
    ]

    async def probe(url: str) -> bool:
        return url not in stuck

    async with Supervisor(
        [children_of], tmp_path, probe, quiet, grace_s=0.1, first_pause_s=0.01, alive_every_s=0.01
    ) as children:
        await children.until_ready()
        before = [child.pid for child in children.children]
        kept = asyncio.ensure_future(children.keep(lambda ended, _: (ends.append(ended), stuck.clear())))
        stuck.add("alive-0")
        async with asyncio.timeout(LIMIT_S):
            while children.children[0].pid == before[0]:
                await asyncio.sleep(0.02)
        await gone(before[0])
        assert [each.what for each in ends] == ["did not answer alive-0 in 3 tries"]
        assert children.children[1].pid == before[1]
        kept.cancel()


async def test_a_child_that_misses_a_try_now_and_then_goes_on(tmp_path: Path) -> None:
    tries = 0

    async def probe(url: str) -> bool:
        nonlocal tries
        tries += 1
        return url == "ready" or tries % 3 == 0

    child = replace(spec("engine-0", SLEEPER), ready_url="ready", alive_url="alive", silent_tries=3)
    async with Supervisor([[child]], tmp_path, probe, quiet, alive_every_s=0.001) as children:
        await children.until_ready()
        kept = asyncio.ensure_future(children.keep(lambda _ended, _pause_s: None))
        async with asyncio.timeout(LIMIT_S):
            while tries < 50:
                await asyncio.sleep(0.01)
        assert not kept.done()
        assert children.children[0].is_running
        kept.cancel()


async def test_a_child_that_ends_again_and_again_is_named_in_the_end(tmp_path: Path) -> None:
    pauses: list[float] = []
    flag = tmp_path / "ran"
    once = f"""
        import pathlib, time
        flag = pathlib.Path({str(flag)!r})
        if not flag.exists():
            flag.touch()
            time.sleep(0.5)
        raise SystemExit('no memory')
    """
    with pytest.raises(ChildFailedError, match="no memory") as failure:  # noqa: PT012 - the whole life
        async with Supervisor(
            [[spec("engine-0", once), spec("engine-1", SLEEPER)]],
            tmp_path,
            logged(tmp_path, ""),
            quiet,
            first_pause_s=0.01,
        ) as children:
            await children.until_ready()
            async with asyncio.timeout(LIMIT_S):
                await children.keep(lambda _, pause_s: pauses.append(pause_s))
    assert failure.value.child == "engine-0"
    assert pauses == [0.01 * 2**each for each in range(TRIES)]
    assert not any(psutil.pid_exists(child.pid) for child in children.children), "the others are stopped too"


async def test_a_child_that_never_becomes_ready_is_a_failure(tmp_path: Path) -> None:
    slow = spec("gateway", SLEEPER, start_limit_s=0.5)
    with pytest.raises(ChildFailedError, match="gateway was not ready within"):
        async with Supervisor([[slow]], tmp_path, logged(tmp_path, "never"), quiet) as children:
            await children.until_ready()


async def test_a_program_that_is_not_there_is_a_clear_message(tmp_path: Path) -> None:
    absent = ChildSpec(name="engine-0", command=("/no/such/program",), environment={}, ready_url="")
    with pytest.raises(CommandError, match=r"cannot start engine-0: /no/such/program is missing"):
        async with Supervisor([[absent]], tmp_path, logged(tmp_path, ""), quiet):
            pytest.fail("it must not get here")


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with Supervisor(
        [[spec("deaf", STUBBORN)]], tmp_path, logged(tmp_path, "deaf"), quiet, grace_s=0.5
    ) as children:
        await children.until_ready()
        pid = children.children[0].pid
    assert not psutil.pid_exists(pid)


async def test_what_a_child_started_is_stopped_with_it(tmp_path: Path) -> None:
    async with Supervisor([[spec("parent", PARENT)]], tmp_path, logged(tmp_path, "child"), quiet) as children:
        await children.until_ready()
        grandchild = int((tmp_path / "parent.log").read_text().split()[1])
        assert psutil.pid_exists(grandchild)
    await gone(grandchild)


SUPERVISE = """
import asyncio, sys
from pathlib import Path
from kvgate.supervision.child import ChildSpec
from kvgate.supervision.supervisor import Supervisor

async def main(folder, code):
    spec = ChildSpec(name="parent", command=(sys.executable, "-c", code), environment={}, ready_url="")
    async def probe(_):
        return True
    async with Supervisor([[spec]], folder, probe, lambda *_: None, grace_s=1.0) as children:
        print(children.children[0].pid, flush=True)
        await children.keep(lambda *_: None)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


async def test_no_orphan_is_left_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), PARENT], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    try:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        grandchild = int((await text_in(tmp_path / "parent.log", "child")).split()[1])
        started = {process.pid for process in psutil.Process(supervisor.pid).children(recursive=True)}
        assert {child, grandchild} < started, "the watchdog is there too"
    finally:
        supervisor.kill()
        supervisor.communicate()
    for pid in started:
        await gone(pid)


START_AND_WAIT = """
import asyncio, os, sys
from pathlib import Path
from kvgate.supervision.child import Child, ChildSpec

async def main(folder, code):
    spec = ChildSpec(name="parent", command=(sys.executable, "-c", code), environment={}, ready_url="")
    child = await Child.start(spec, folder)
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


async def test_a_child_that_was_never_let_go_ends_with_its_supervisor(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(tmp_path), SLEEPER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path.cwd(),
    )
    try:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert psutil.Process(child).name() != "python", "it waits to be let go"
    finally:
        supervisor.kill()
        supervisor.communicate()
    await gone(child)
    assert (tmp_path / "parent.log").read_text() == ""


async def test_stopping_takes_no_longer_than_the_grace(tmp_path: Path) -> None:
    child = await Child.start(spec("a", SLEEPER), tmp_path)
    await child.let_go()
    await text_in(tmp_path / "a.log", "up")
    before_s = time.monotonic()
    await child.stop(grace_s=LIMIT_S)
    assert time.monotonic() - before_s < LIMIT_S, "SIGTERM ended it, the grace wasn't used up"
    assert not child.is_running


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(-200) == "was killed by signal 200"


def test_the_last_lines_of_a_log_come_without_colours_and_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n\x1b[31mred\x1b[0m\n\n10%\r100%\n" + b"\xff odd\n")
    assert last_lines(log, 3) == ["10%", "100%", "\N{REPLACEMENT CHARACTER} odd"]
    assert last_lines(log)[1] == "red"
    assert last_lines(tmp_path / "absent") == []
