"""A real instance process: LMDeploy's api_server with kvgate's hooks."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from kvgate.host.ports import free_ports
from tests.support.warm_process import Warm, WarmProcess

READY_WITHIN_S = 180.0
LAUNCHER = "engines.lmdeploy.launch"


def free_port() -> int:
    """One that the kernel gives to nobody by itself while the engine loads."""
    return free_ports(1)[0]


def arguments(model: Path | str, port: int, *options: str) -> list[str]:
    return [
        *("serve", "api_server", str(model)),
        *("--server-name", "127.0.0.1", "--server-port", str(port), "--backend", "pytorch", "--model-name", "m"),
        *("--cache-block-seq-len", "16", "--num-gpu-blocks", "64", "--enable-prefix-caching", *options),
    ]


@dataclass(slots=True)
class Instance:
    """``with Instance.start(...)`` yields once it is healthy, and leaves no process behind."""

    process: subprocess.Popen[bytes] | WarmProcess
    port: int
    log: Path

    @classmethod
    def start(  # noqa: PLR0913 - each is one more thing that a test may want otherwise
        cls,
        model: Path,
        log: Path,
        *options: str,
        settings: Mapping[str, str] | None = None,
        launcher: str = LAUNCHER,
        port: int | None = None,
        fresh: bool = False,
    ) -> Self:
        """Start one with ``settings`` in its environment; ``launcher`` is the module to run.

        A ``fresh`` one imports all of its libraries itself, which takes longer than all else that it does.
        """
        port = free_port() if port is None else port
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVGATE_ENGINE_CPU_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= settings or {}
        words = arguments(model, port, *options)
        with log.open("wb") as output:
            if fresh:
                process: subprocess.Popen[bytes] | WarmProcess = subprocess.Popen(
                    [sys.executable, "-m", launcher, *words],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            else:
                process = Warm.mine().start(launcher, words, environment=environment, output=output)
        return cls(process, port, log)

    def __enter__(self) -> Self:
        try:
            self.wait_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children()
        self.process.kill()
        self.process.wait(30)
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the instance ended with {self.process.returncode}:\n{self.output()}"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310 - our own
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"the instance was not healthy after {READY_WITHIN_S} s:\n{self.output()}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def engine_process(self) -> psutil.Process:
        """The child that LMDeploy spawned and named."""
        for child in self.children():
            if child.name() == "ZMQMPEngine":
                return child
        raise AssertionError(f"no engine process among {self.children()}")
