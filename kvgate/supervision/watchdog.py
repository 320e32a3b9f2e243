"""The process that stops the children of a supervisor that was killed.

A supervisor that gets SIGKILL can't stop its children; the kernel's parent-death signal reaches only direct children
and not on every system. So a supervisor starts this program first, in a session of its own, and tells it through a
pipe which process groups are alive: ``+PGID`` and ``-PGID``, a line each. When the pipe ends, however the supervisor
ended, whatever groups are left get SIGTERM, and after ``grace_s`` SIGKILL.

Run by its path with nothing but the standard library, so that it starts in tens of milliseconds and can't fail for a
package. ``python watchdog.py GRACE_SECONDS``.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import TextIO

POLL_S = 0.05


def watch(lines: TextIO, *, grace_s: float) -> None:
    """Follow the supervisor until its pipe ends, then stop the groups that are left."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    stop_groups(groups, grace_s=grace_s)


def stop_groups(
    groups: Iterable[int],
    *,
    grace_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send SIGTERM to each group, wait at most ``grace_s`` for all to go, then SIGKILL to those left."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline_s = clock() + grace_s
    while left and clock() < deadline_s:
        sleep(POLL_S)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def signal_group(group: int, number: int) -> bool:
    """Signal a process group; False when nothing of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # PermissionError: only zombies are left (macOS)
        return False
    return True


def main() -> None:
    """Serve one supervisor: its lines come on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the pipe is the one reason to stop
    with contextlib.suppress(BrokenPipeError):
        watch(sys.stdin, grace_s=float(sys.argv[1]))


if __name__ == "__main__":
    main()
