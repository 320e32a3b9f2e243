"""Threads whose interleaving is chosen by a seed: the same seed runs the same program in the same order.

Of all threads one runs at a time. At every bytecode of the modules under test it may hand its turn to another one, as
the seed says; a thread that would wait for a lock hands on at once. So every order in which the interpreter could
interleave the threads at those places can come up, a failure comes again, and a shrinker can make it small.
"""

import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

_WAIT_S = 60.0
_LONGEST_TURN = 800
_MOST_TRIES = 100_000


class Turns:
    """Runs functions as threads that take turns within ``modules``, which take no lock but ``TurnLock``."""

    def __init__(self, seed: int, modules: Sequence[ModuleType]) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a schedule
        self._left = 0
        self._files = {str(module.__file__) for module in modules}
        self._go: list[threading.Semaphore] = []
        self._alive: list[int] = []
        self._me = 0
        self._failures: list[BaseException] = []

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run all to their ends; raises what the first failing one raised."""
        self._go = [threading.Semaphore(0) for _ in works]
        self._alive = [*range(len(works))]
        threads = [
            threading.Thread(target=self._run_one, args=(place, work), daemon=True) for place, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        if threads:
            self._give(self._random.choice(self._alive))
        for thread in threads:
            thread.join(_WAIT_S)
        if self._failures:
            raise self._failures[0]
        if any(thread.is_alive() for thread in threads):
            raise AssertionError("the threads wait for each other")

    def hand_on(self, *, must: bool = False) -> None:
        """Let another thread run, if the seed says so or one ``must``."""
        self._left -= 1
        if not must and self._left > 0:
            return
        # Mostly short, now and then so long that another thread does several calls between two bytecodes of one.
        self._left = 1 + int(_LONGEST_TURN * self._random.random() ** 4)
        me = self._me
        others = [place for place in self._alive if place != me]
        if not others:
            if must:
                raise AssertionError("the last thread waits for a lock")
            return
        self._give(self._random.choice(others))
        self._take(me)

    def _give(self, place: int) -> None:
        self._me = place
        self._go[place].release()

    def _take(self, place: int) -> None:
        if not self._go[place].acquire(timeout=_WAIT_S):
            raise AssertionError(f"thread {place} never got its turn")

    def _run_one(self, place: int, work: Callable[[], None]) -> None:
        try:
            self._take(place)
            sys.settrace(self._trace)
            try:
                work()
            finally:
                sys.settrace(None)
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._failures.append(error)
        finally:
            self._alive.remove(place)
            if self._alive:
                self._give(self._random.choice(self._alive))

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        del frame, argument
        if event in {"opcode", "line"}:
            self.hand_on()
        return self._step


class TurnLock:
    """A lock for threads of ``Turns``; who can't have it hands on its turn."""

    def __init__(self) -> None:
        self.turns: Turns | None = None
        self._taken = False

    def acquire(self) -> None:
        for _ in range(_MOST_TRIES):
            if not self._taken:
                self._taken = True
                return
            if self.turns is None:
                break
            self.turns.hand_on(must=True)
        raise AssertionError("the lock is never released")

    def release(self) -> None:
        self._taken = False
