"""locust as its users run it: headless, in a process of its own."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

LOCUSTFILE = Path(__file__).parents[2] / "loadtests" / "locustfile.py"
LIMIT_S = 300.0


async def locust(folder: Path, url: str, *arguments: str) -> tuple[int, str]:
    """Return its exit status and all that it said; it runs in ``folder``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--host", url),
        *arguments,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(("LOCUST", "PYTHONPATH"))},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, (out + err).decode()


__all__ = ["locust"]
