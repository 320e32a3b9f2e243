"""A real llama.cpp server (of ``xllamacpp``) in a process of its own: a plain OpenAI-compatible engine.

``python -m tests.support.llama_server GGUF PORT MODEL SLOTS`` serves until it is killed.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.instance import free_port
from tests.support.processes import answers, eventually

START_LIMIT_S = 180.0
CONTEXT_TOKENS = 4096


@contextmanager
def llama_server(gguf: Path, log: Path, *, model: str, slots: int) -> Iterator[str]:
    """Yield the URL of a healthy server. It caches one prompt for each slot, and nothing beyond."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.llama_server", str(gguf), str(port), model, str(slots)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: answers(f"{url}/health") or process.poll() is not None, START_LIMIT_S, f"200 from {url}")
        assert process.poll() is None, log.read_text(errors="replace")
        yield url
    finally:
        process.kill()
        process.wait(30)


def _serve(gguf: str, port: str, model: str, slots: str) -> None:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = gguf
    parameters.model_alias = {model}
    parameters.port = int(port)
    parameters.n_parallel = int(slots)
    parameters.n_ctx = CONTEXT_TOKENS * int(slots)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.n_threads_http = 8
    parameters.cache_ram_mib = 0
    parameters.warmup = False
    serving = xllamacpp.Server(parameters)
    assert serving.listening_address
    threading.Event().wait()


if __name__ == "__main__":
    _serve(*sys.argv[1:])


__all__ = ["llama_server"]
