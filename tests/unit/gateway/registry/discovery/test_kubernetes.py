import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.registry import InstanceSpec
from gateway.registry.discovery import DiscoveryError, KubernetesAccess, KubernetesWatcher, ServicePort
from tests.support.kubernetes_api import KubernetesApi, endpoint
from tests.support.running_gateway import eventually


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi().started() as running:
        yield running


@pytest.fixture
def watcher(api: KubernetesApi, tmp_path: Path) -> KubernetesWatcher:
    token = tmp_path / "token"
    token.write_text(api.token + "\n")
    access = KubernetesAccess(url=api.url, token_file=token, ca_file=None)
    return KubernetesWatcher(ServicePort(namespace="llm", service="engines", port="http"), access)


def urls(specs: Sequence[InstanceSpec]) -> dict[str, str]:
    return {each.id: each.url for each in specs}


async def test_ready_endpoints_are_instances_named_by_their_pods(
    api: KubernetesApi, watcher: KubernetesWatcher
) -> None:
    await api.put(
        "engines-x",
        endpoint("10.1.0.1", "engine-0"),
        endpoint("10.1.0.2", "engine-1", ready=False),
        endpoint("10.1.0.3"),
    )
    await api.put("engines-y", endpoint("fd00::1", "engine-6"), kind="IPv6", port=9000)
    async with aclosing(watcher.watch()) as seen:
        assert urls(await anext(seen)) == {
            "10.1.0.3-8000": "http://10.1.0.3:8000",
            "engine-0": "http://10.1.0.1:8000",
            "engine-6": "http://[fd00::1]:9000",
        }


async def test_changes_are_followed_and_a_terminating_pod_is_no_longer_named(
    api: KubernetesApi, watcher: KubernetesWatcher
) -> None:
    async with aclosing(watcher.watch()) as seen:
        assert await anext(seen) == []
        await api.put("x", endpoint("10.1.0.1", "engine-0"))
        assert urls(await anext(seen)) == {"engine-0": "http://10.1.0.1:8000"}
        await api.put("x", endpoint("10.1.0.1", "engine-0", terminating=True), endpoint("10.1.0.2", "engine-1"))
        assert urls(await anext(seen)) == {"engine-1": "http://10.1.0.2:8000"}
        await api.delete("x")
        assert await anext(seen) == []
    assert api.lists == 1


async def test_a_watch_that_ends_is_taken_up_where_it_was_also_after_a_bookmark(
    api: KubernetesApi, watcher: KubernetesWatcher
) -> None:
    async with aclosing(watcher.watch()) as seen:
        await anext(seen)
        waiting = asyncio.ensure_future(anext(seen))
        await eventually(lambda: len(api.watches) == 1)
        await api.bookmark()
        await asyncio.sleep(0.05)
        await api.end_watches()
        await eventually(lambda: len(api.watches) == 2)
        assert api.watches[1] == str(api.version)
        await api.put("x", endpoint("10.1.0.1", "engine-0"))
        assert urls(await waiting) == {"engine-0": "http://10.1.0.1:8000"}
    assert api.lists == 1


async def test_a_version_that_is_gone_begins_with_a_new_list(api: KubernetesApi, watcher: KubernetesWatcher) -> None:
    async with aclosing(watcher.watch()) as seen:
        await anext(seen)
        waiting = asyncio.ensure_future(anext(seen))
        await eventually(lambda: len(api.watches) == 1)
        api.slices = {}
        await api.forget()
        assert await waiting == []
        assert api.lists == 2


@pytest.mark.parametrize("status", [403, 500])
async def test_a_refusal_is_an_error_with_what_the_server_said(
    api: KubernetesApi, watcher: KubernetesWatcher, status: int
) -> None:
    api.status = status
    with pytest.raises(DiscoveryError, match=f"llm/engines: the API server answered {status} no"):
        await anext(watcher.watch())


OPENED: list[tuple[str, int]] = []
"""Paths in the order of their opening, with the threads."""


@pytest.fixture(scope="module")
def opened() -> list[tuple[str, int]]:
    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith("/token"):
            OPENED.append((arguments[0], threading.get_ident()))

    sys.addaudithook(note)  # it stays: Python can't remove one
    return OPENED


async def test_the_token_is_read_beside_the_event_loop(
    api: KubernetesApi, watcher: KubernetesWatcher, tmp_path: Path, opened: list[tuple[str, int]]
) -> None:
    opened.clear()
    async with aclosing(watcher.watch()) as seen:
        assert await anext(seen) == []
        await api.put("x", endpoint("10.1.0.1", "engine-0"))
        await anext(seen)
    threads = [thread for path, thread in opened if path == str(tmp_path / "token")]
    assert len(threads) >= 2  # for the list and for the watch
    assert threading.get_ident() not in threads


async def test_a_token_file_that_is_none_is_named_and_waits_for_nobody(api: KubernetesApi, tmp_path: Path) -> None:
    fifo, binary = tmp_path / "fifo", tmp_path / "binary"
    os.mkfifo(fifo)
    binary.write_bytes(b"\xff")
    for path, why in ((fifo, "is a FIFO; it must be a regular file"), (binary, "is not ASCII text")):
        access = KubernetesAccess(url=api.url, token_file=path, ca_file=None)
        watcher = KubernetesWatcher(ServicePort(namespace="llm", service="engines"), access)
        with pytest.raises(DiscoveryError, match=f"the token file {path} {why}"):
            await anext(watcher.watch())


async def test_a_token_is_read_anew_for_each_request(
    api: KubernetesApi, watcher: KubernetesWatcher, tmp_path: Path
) -> None:
    api.token = "rotated"  # noqa: S105 - no secret
    with pytest.raises(DiscoveryError, match="401"):
        await anext(watcher.watch())
    (tmp_path / "token").write_text("rotated")
    async with aclosing(watcher.watch()) as seen:
        assert await anext(seen) == []
