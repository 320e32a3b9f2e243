"""A process that opens a tier's file or arena at once with others, and uses it until its input ends.

    python -m tests.support.one_file file|arena PATH

It says ``ready`` when it has loaded, waits for a line, and says ``open`` or ``refused``, and why.
"""

import sys
from dataclasses import replace
from pathlib import Path

from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import BlockStatus, HostArena, KvRuntimeError, Move
from kvcontrol.kv_runtime.backends.file import FileBackend
from tests.support.block_writer import BLOCK_BYTES, sealed, spec_at

_MINE = BlockHash(b"m" * 16)


def main() -> None:
    kind, spec = sys.argv[1], replace(spec_at(Path(sys.argv[2])), lock_timeout_s=0.5)
    print("ready", flush=True)  # noqa: T201 - the test waits for it
    sys.stdin.readline()
    try:
        opened = FileBackend(spec) if kind == "file" else HostArena.in_file(spec)
    except KvRuntimeError as error:
        print("refused", error, flush=True)  # noqa: T201 - the test reads it
        return
    data, seal = sealed(_MINE)
    if isinstance(opened, FileBackend):
        arena = HostArena(slots=1, block_bytes=BLOCK_BYTES)
        with arena.view(0) as view:
            view[:] = data
        works = opened.write([Move(0, 0, seal)], arena) == [BlockStatus.OK]
    else:
        with opened.view(0) as view:
            view[:] = data
        opened.seal(0, seal)
        works = True
    print("open" if works else "refused: it can't be written", flush=True)  # noqa: T201 - the test reads it
    sys.stdin.readline()


if __name__ == "__main__":
    main()
