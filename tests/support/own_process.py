"""Code in a process of its own, where no other test of the run has changed anything, and that begins with libraries.

    python -m tests.support.own_process CODE

runs the code as ``python -c`` would.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.support.warm_process import Warm

WITHIN_S = 240.0


def ran(code: str, *, spares: int = 0, **environment: str) -> str:
    """Run code in a fork of the warm process; returns what it writes. Fails when it ends with another code than 0.

    So many ``spares`` are there for what it starts with ``python -m``.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        with log.open("wb") as output:
            process = Warm.mine().start(
                "tests.support.own_process",
                [code],
                environment={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                output=output,
                spares=spares,
            )
        ended = process.wait(WITHIN_S)
        said = log.read_text()
    assert ended == 0, said
    return said


if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})  # noqa: S102 - a test's own code


__all__ = ["ran"]
