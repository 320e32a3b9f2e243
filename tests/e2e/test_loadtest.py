"""The smoke scenario of the load tests against ``kvgate up --tiny``: real engines keep its thresholds."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import Running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Importing it here would replace the blocking calls of this process.
    pytest.mark.skipif(find_spec("locust") is None, reason="the loadtest extra is not installed"),
]

LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
LIMIT_S = 180.0


def test_real_engines_keep_the_thresholds_of_the_smoke(stack: tuple[Running, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"),
            *("--host", stack[1], "--scenario", "smoke", "--html", str(tmp_path / "smoke.html")),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all thresholds of scenario smoke hold" in done.stderr
    assert (tmp_path / "smoke.html").stat().st_size > 0
