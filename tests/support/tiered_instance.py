"""An instance with tiers that can be broken, killed and started again over the same disk and shared memory."""

import os
import random
import threading
import time
import urllib.error
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Self

from kvcontrol.core.control import InstanceStats, OffloadStats
from tests.support.faulty_instance import FAULTS_VARIABLE
from tests.support.instance import Instance
from tests.support.kv_events import stats
from tests.support.revisits import Answer, ask
from tests.support.transfer_faults import FaultPlan

RETRY_WITHIN_S = 240.0
FILE_NAME = "kv.blocks"
_PAGE = 4096


@dataclass(slots=True)
class TieredInstance(AbstractContextManager["TieredInstance"]):
    """``folder`` has its disk, logs and fault plan; ``options`` go to LMDeploy's command line."""

    model: Path
    folder: Path
    settings: Mapping[str, str]
    options: tuple[str, ...] = ()
    starts: int = 0
    instance: Instance | None = None
    up: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def begin(cls, model: Path, folder: Path, settings: Mapping[str, str], *options: str) -> Self:
        """Start the process; entering waits until it is healthy."""
        tiered = cls(model, folder, settings, options)
        tiered.break_transfers({})
        tiered.start()
        return tiered

    def __enter__(self) -> Self:
        self.wait()
        self.up.set()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self.starts += 1
        self.instance = Instance.start(
            self.model,
            self.folder / f"log.{self.starts}",
            *self.options,
            settings={**self.settings, FAULTS_VARIABLE: str(self._plan)},
            launcher="tests.support.faulty_instance",
        )

    def wait(self) -> None:
        """Return once it is healthy; ``up`` is the caller's to set."""
        assert self.instance is not None
        self.instance.__enter__()

    def kill(self) -> None:
        """SIGKILL, server and engine."""
        self.up.clear()
        if self.instance is not None:
            self.instance.__exit__()

    @property
    def _plan(self) -> Path:
        return self.folder / "faults.json"

    @property
    def url(self) -> str:
        assert self.instance is not None
        return self.instance.url

    def stats(self) -> InstanceStats:
        return stats(self.url)

    @property
    def offload(self) -> OffloadStats:
        offload = self.stats().offload
        assert offload is not None
        return offload

    def break_transfers(self, plan: Mapping[str, Mapping[str, float]]) -> None:
        FaultPlan.write(self._plan, plan)

    def ask(self, text: str, *, new_tokens: int, salt: str = "") -> Answer:
        """Ask until there is an answer: an instance that is killed meanwhile is asked again when it is back."""
        until_s = time.monotonic() + RETRY_WITHIN_S
        while True:
            assert self.up.wait(RETRY_WITHIN_S), "the instance does not come back"
            try:
                return ask(self.url, text, new_tokens=new_tokens, salt=salt)
            except (OSError, HTTPException) as error:  # the latter where the answer has begun
                is_ours = isinstance(error, urllib.error.HTTPError) and error.code < 500  # the request's own fault
                if is_ours or time.monotonic() > until_s:
                    raise
                time.sleep(0.2)

    def flip_bytes(self, *, share: float, seed: int = 1) -> int:
        """Flip a byte in a share of the file's pages that hold anything, and return in how many."""
        chooser = random.Random(seed)  # noqa: S311 - places, not secrets
        path = Path(self.settings["KVGATE_ENGINE_NVME_PATH"]) / FILE_NAME
        flipped = 0
        with path.open("r+b", buffering=0) as file:
            for start in range(_PAGE, os.fstat(file.fileno()).st_size, _PAGE):
                page = os.pread(file.fileno(), _PAGE, start)
                if any(page) and chooser.random() < share:
                    place = chooser.randrange(len(page))
                    os.pwrite(file.fileno(), bytes([page[place] ^ 0x10]), start + place)
                    flipped += 1
        return flipped


__all__ = ["FILE_NAME", "TieredInstance"]
