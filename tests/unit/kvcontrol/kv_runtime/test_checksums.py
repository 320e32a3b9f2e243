"""The compiled helper against the xxhash package, and what happens where it can't be had."""

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcontrol.kv_runtime import HostArena, checksum
from kvcontrol.kv_runtime.checksums import NativeChecksums, fastest, one_by_one
from kvcontrol.kv_runtime.native import compiled, native

needs_compiler = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler"
)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _forget()
    yield
    _forget()


def _forget() -> None:
    native.cache_clear()
    fastest.cache_clear()


@pytest.fixture(params=[1, 7, 240, 4_096, 100_003])
def arena(request: pytest.FixtureRequest) -> Iterator[HostArena]:
    made = HostArena(slots=9, block_bytes=request.param)
    rng = random.Random(4)  # noqa: S311 - reproducible, not secret
    for slot in range(made.slots):
        made.view(slot)[:] = rng.randbytes(made.block_bytes)
    yield made
    made.close()


@needs_compiler
def test_the_native_ones_are_those_of_the_package(arena: HostArena) -> None:
    native = fastest()
    assert isinstance(native, NativeChecksums)
    slots = [3, 0, 8, 8, 1]
    assert native(arena, slots) == one_by_one(arena, slots) == [checksum(arena.view(slot)) for slot in slots]
    assert native(arena, []) == []


@needs_compiler
@pytest.mark.parametrize("slots", [[-1], [9], [0, 9]])
def test_slots_that_are_not_there_are_refused(arena: HostArena, slots: list[int]) -> None:
    with pytest.raises(IndexError, match="of an arena with 9"):
        fastest()(arena, slots)


@needs_compiler
def test_it_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    fastest()
    [library] = (tmp_path / "cache" / "kvgate").iterdir()
    made_ns = library.stat().st_mtime_ns
    _forget()
    assert isinstance(fastest(), NativeChecksums)
    assert library.stat().st_mtime_ns == made_ns


def test_without_a_compiler_blocks_are_summed_one_by_one_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert fastest() is one_by_one
    assert "no C compiler" in caplog.text


@needs_compiler
def test_a_cache_that_can_not_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with caplog.at_level(logging.WARNING):
        assert fastest() is one_by_one
    assert "one by one" in caplog.text


@needs_compiler
def test_a_broken_library_in_the_cache_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    compiled().write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert fastest() is one_by_one
