import io
import os
import signal
import subprocess
import sys

import pytest

from kvgate.supervision import watchdog


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def test_a_group_that_is_left_at_the_end_is_stopped(sleeper: subprocess.Popen[bytes]) -> None:
    watchdog.watch(io.StringIO(f"+{sleeper.pid}\n"), grace_s=0.2)
    assert sleeper.wait(60) in {-signal.SIGTERM, -signal.SIGKILL}


def test_a_group_that_was_taken_back_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    try:
        watchdog.watch(io.StringIO(f"+{sleeper.pid}\n-{sleeper.pid}\n"), grace_s=0.2)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_group_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        now_s = 0.0

        def sleep(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

        watchdog.stop_groups([deaf.pid], grace_s=5.0, sleep=sleep, clock=lambda: now_s)
        assert deaf.wait(60) == -signal.SIGKILL
        assert now_s >= 5.0


def test_a_group_that_is_gone_already_is_no_error() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    done.wait(60)
    assert not watchdog.signal_group(done.pid, 0)


def test_the_program_ignores_ctrl_c_and_ends_with_its_input() -> None:
    with subprocess.Popen([sys.executable, "-IS", watchdog.__file__, "1"], stdin=subprocess.PIPE) as program:
        assert program.stdin is not None
        program.stdin.write(b"+999999999\n")
        program.stdin.flush()
        os.kill(program.pid, signal.SIGCONT)
        program.stdin.close()
        assert program.wait(60) == 0
