"""Our own gateway as the target: a process in front of the two mock backends."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvgate.host.ports import free_ports

_STOP_S = 15.0


@contextmanager
def own_gateway(backends: Sequence[int], **settings: str) -> Iterator[tuple[str, int]]:
    """Run ``kvgate gateway`` before backends on these ports; yields its address and process id, and leaves no process
    behind.
    """
    port = free_ports(1)[0]
    instances = [{"id": f"mock-{each}", "url": f"http://127.0.0.1:{each}"} for each in backends]
    with tempfile.TemporaryDirectory(prefix="kvgate-conformance-") as folder:
        mine = {
            "KVGATE_PORT": str(port),
            "KVGATE_INSTANCES": json.dumps(instances),
            "KVGATE_STATE_DIR": str(Path(folder) / "state"),
            "KVGATE_LOG_LEVEL": "error",
            "KVGATE_SHUTDOWN_NOTICE_S": "0",
            **{f"KVGATE_{name.upper()}": value for name, value in settings.items()},
        }
        others = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
        process = subprocess.Popen([sys.executable, "-m", "gateway"], env=others | mine)
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
