"""Single keys from a terminal, and the terminal as it was before when the block ends, however it ends."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[None]:
    """Let keys arrive without Enter and unseen while the block runs; Ctrl-C still interrupts."""
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def key_within(seconds: float) -> str | None:
    """Return what was typed within this time, None when nothing was; raises ``EOFError`` when the terminal is gone."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
    if not readable:
        return None
    typed = os.read(sys.stdin.fileno(), 64)
    if not typed:
        raise EOFError
    return typed.decode("utf-8", "replace")
