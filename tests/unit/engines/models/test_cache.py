import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from engines.models import cache
from engines.models.cache import MANIFEST, CacheError, Silent, cache_dir, cached, problem_of

RECIPE = "test v1"


class Builder:
    """Writes two files and counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        self.times += 1
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "config.json").write_text("{}")


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, what: str) -> None:
        self.notes.append(what)


def make(folder: Path, builder: Builder, *, recipe: str = RECIPE, progress: Silent | None = None) -> Path:
    return cached(folder, builder, recipe=recipe, needed_bytes=1, progress=progress or Silent())


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    builder = Builder()
    first = make(tmp_path / "cache" / "m", builder)
    assert make(tmp_path / "cache" / "m", builder) == first
    assert builder.times == 1
    assert (first / "weights").read_bytes() == b"w" * 1000


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "weights").write_bytes(b"x" * 1000), "weights is damaged"),
        (lambda folder: (folder / "weights").write_bytes(b"w" * 999), "weights is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "not complete"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest can't be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest can't be read"),
    ],
)
def test_a_damaged_folder_is_noticed_and_built_again(tmp_path: Path, harm: object, said: str) -> None:
    assert callable(harm)
    builder, told = Builder(), Told()
    folder = make(tmp_path / "m", builder)
    harm(folder)
    assert said in (problem_of(folder, RECIPE) or "")
    make(folder, builder, progress=told)
    assert builder.times == 2
    assert said in told.notes[0]
    assert problem_of(folder, RECIPE) is None


def test_another_recipe_is_another_folder(tmp_path: Path) -> None:
    builder = Builder()
    make(tmp_path / "m", builder)
    make(tmp_path / "m", builder, recipe="test v2")
    assert builder.times == 2


def test_a_build_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        cached(tmp_path / "m", broken, recipe=RECIPE, needed_bytes=1, progress=Silent())
    assert not (tmp_path / "m").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_what_a_killed_builder_left_is_swept(tmp_path: Path) -> None:
    left = tmp_path / ".m-abc"
    left.mkdir()
    (left / "half").write_text("half")
    make(tmp_path / "m", Builder())
    assert not left.exists()


def test_too_little_room_is_told_before_building(tmp_path: Path) -> None:
    builder = Builder()
    with pytest.raises(CacheError, match="MB free") as failure:
        cached(tmp_path / "m", builder, recipe=RECIPE, needed_bytes=10**18, progress=Silent())
    assert "KVGATE_CACHE_DIR" in failure.value.advice
    assert builder.times == 0


def test_a_full_disk_is_a_clear_message(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        import errno

        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with pytest.raises(CacheError, match="the disk is full") as failure:
        cached(tmp_path / "m", full, recipe=RECIPE, needed_bytes=1, progress=Silent())
    assert "free some space" in failure.value.advice


def test_a_folder_that_cannot_be_made_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write"):
        make(tmp_path / "file" / "m", Builder())


def _slow_build(folder: Path) -> None:
    import time

    with (folder.parent.parent / "builds").open("a") as log:
        log.write("x")
    time.sleep(1)
    (folder / "weights").write_text("w")


def _prepare(folder: str) -> None:
    cached(Path(folder), _slow_build, recipe=RECIPE, needed_bytes=1, progress=Silent())


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    # Builders see their scratch folder inside the cache, so its parent's parent is the cache itself.
    both = [spawn.Process(target=_prepare, args=(str(tmp_path / "m"),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_waiting_for_another_builder_is_said_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(cache, "LOCK_LIMIT_S", 0.0)
    monkeypatch.setattr(cache, "LOCK_POLL_S", 0.01)
    told = Told()
    with (tmp_path / ".m.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CacheError, match="another process has been making"):
            make(tmp_path / "m", Builder(), progress=told)
    assert "another process is making" in told.notes[0]


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", Builder())
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["recipe"] == RECIPE
    assert sorted(manifest["files"]) == ["config.json", "weights"]


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGATE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvgate"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/kvgate")
    monkeypatch.setenv("KVGATE_CACHE_DIR", "/y")
    assert cache_dir() == Path("/y")


def test_the_folder_can_be_removed_by_hand(tmp_path: Path) -> None:
    builder = Builder()
    shutil.rmtree(make(tmp_path / "m", builder))
    make(tmp_path / "m", builder)
    assert builder.times == 2
