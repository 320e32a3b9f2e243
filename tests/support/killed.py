"""Kill the block writer at a moment of its life that nobody chose."""

import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_and_kill(kind: str, path: Path, *, seed: int) -> None:
    """Let it fill ``path``, and end it with SIGKILL up to 50 ms later."""
    command = [sys.executable, "-m", "tests.support.block_writer", kind, str(path), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == b"full\n"
            time.sleep(random.Random(seed).uniform(0, 0.05))  # noqa: S311 - reproducible, not secret
        finally:
            writer.kill()
        writer.wait(60)
