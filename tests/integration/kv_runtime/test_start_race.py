"""Many instances that start at once over one store: one has it, the others say so, and nothing is damaged."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcontrol.kv_runtime import HostArena
from kvcontrol.kv_runtime.backends.file import FileBackend
from tests.support.block_writer import spec_at

_LIMIT_S = 120.0
_AT_ONCE = 8


@pytest.mark.parametrize("kind", ["file", "arena"])
@pytest.mark.parametrize("shared", [True, False])
def test_instances_that_start_at_once_each_get_a_whole_file_or_a_refusal(
    tmp_path: Path, kind: str, *, shared: bool
) -> None:
    paths = [tmp_path / ("blocks" if shared else f"blocks-{number}") for number in range(_AT_ONCE)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.one_file", kind, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for path in paths
        ]
        for process in processes:
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.stdout.readline() for process in processes if process.stdout is not None]
        opened = [line for line in said if line == "open\n"]
        refused = [line for line in said if line.startswith("refused")]
        assert len(opened) == (1 if shared else _AT_ONCE), said
        assert len(opened) + len(refused) == _AT_ONCE, said
        assert all("in use by another process" in line for line in refused), said
        for process in processes:
            process.communicate("end\n" if process.poll() is None else None, timeout=_LIMIT_S)
    for path in set(paths):
        store = FileBackend(spec_at(path)) if kind == "file" else HostArena.in_file(spec_at(path))
        assert len(list(store.recover())) == 1
        store.close()
