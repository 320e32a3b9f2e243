"""The first impression: the real model behind the real command (slow lane: 93 MB are fetched the first time)."""

import subprocess
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from kvgate.host.ports import free_ports
from tests.support.processes import running

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_the_printed_curl_is_answered_with_paris(tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    settings = {"KVGATE_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "200"}
    with running(["up", "--port", port], tmp_path / "up.log", settings) as up:
        said = up.until_said("Ctrl-C stops everything")
        line = next(line for line in said.splitlines() if "curl -s" in line)
        done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=600, check=True)
    answer = ChatCompletion.model_validate_json(done.stdout)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
