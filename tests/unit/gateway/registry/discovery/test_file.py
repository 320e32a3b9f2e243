import os
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.registry.discovery import DiscoveryError, FileWatcher


async def test_the_list_is_read_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text("- {id: a, url: http://10.0.0.1:9001}\n")
    async with aclosing(FileWatcher(path, interval_s=0.01).watch()) as seen:
        assert [each.id for each in await anext(seen)] == ["a"]
        replaced = tmp_path / "new"
        replaced.write_text('[{"id": "b", "url": "http://10.0.0.2:9001"}]')
        replaced.replace(path)
        assert [(each.id, each.url) for each in await anext(seen)] == [("b", "http://10.0.0.2:9001")]
        path.write_text("[]")
        assert await anext(seen) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {id: a, url: ftp://x}", "0.url: an instance url looks like"),
        ("- {id: a, url: http://x:1, weight: 2}", "0.weight"),
        ("{id: a}", "valid list"),
        ("", r"is empty; a list without instances is written \[\]"),
        ("# nobody\n", "is empty"),
        ("0", "valid list"),
        ("[", "is not YAML"),
        ("- {id: 2001-13-45, url: http://x:1}", "is not YAML: invalid value"),
        ("[" * 3_000, "is not YAML: it is nested too deeply"),
        ("[{id: a, url: http://x:1}, {id: a, url: http://x:2}]", "the id a appears twice"),
    ],
)
async def test_a_file_that_is_no_list_of_instances_is_an_error_that_says_where(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "instances.yaml"
    path.write_text(text)
    with pytest.raises(DiscoveryError, match=said):
        await anext(FileWatcher(path, interval_s=0.01).watch())


async def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="No such file"):
        await anext(FileWatcher(tmp_path / "none", interval_s=0.01).watch())


async def test_a_fifo_is_an_error_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "instances.yaml"
    os.mkfifo(path)
    with pytest.raises(DiscoveryError, match="is a FIFO; it must be a regular file"):
        await anext(FileWatcher(path, interval_s=0.01).watch())


@pytest.mark.parametrize(("path", "kind"), [("/dev/zero", "character device"), ("/proc", "directory")])
async def test_what_is_no_regular_file_is_an_error(path: str, kind: str) -> None:
    with pytest.raises(DiscoveryError, match=f"is a {kind}; it must be a regular file"):
        await anext(FileWatcher(Path(path), interval_s=0.01).watch())
