"""A race with a structure that has to live in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvgate
from kvgate.failure import CommandError
from lab.bench.prefix import sglang_radix
from lab.bench.prefix.lookup_times import LookupTimes, Quantiles
from lab.bench.prefix.race import RacePlan

SGLANG = "sglang"
_MARK = Path("sglang/srt/mem_cache/radix_cache.py")
_LIMIT_S = 600.0


def sglang_folder(option: str) -> Path:
    """Parse ``sglang=FOLDER``; raises ``CommandError`` for another name, or a folder without SGLang."""
    name, _, value = option.partition("=")
    if name != SGLANG or not value:
        raise CommandError(f"--peer {option}: not a known peer with its folder", f"write --peer {SGLANG}=FOLDER")
    folder = Path(value).resolve()
    if not (folder / _MARK).is_file():
        raise CommandError(
            f"--peer {option}: there is no {_MARK}", "name a folder into which sglang's wheel is unpacked"
        )
    return folder


def against_sglang(folder: Path, plan: RacePlan) -> tuple[LookupTimes, ...]:
    """Race our index with SGLang's; raises ``CommandError`` with the child's last words when it fails.

    What is installed here comes before what the folder has, so that both run on the same libraries.
    """
    roots = [str(Path(kvgate.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "times.json"
        command = [sys.executable, "-P", "-m", sglang_radix.__name__, json.dumps(asdict(plan)), str(result)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, str(folder)])}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"--peer {SGLANG}={folder}: not done after {_LIMIT_S:.0f} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CommandError(
                f"--peer {SGLANG}={folder}: {last}", "put what sglang.srt.mem_cache.radix_cache imports into the folder"
            )
        return tuple(_times(each) for each in json.loads(result.read_text(encoding="utf-8")))


def _times(said: dict[str, Any]) -> LookupTimes:
    return LookupTimes(**(said | {name: Quantiles(**said[name]) for name in ("hit", "partial", "miss")}))
