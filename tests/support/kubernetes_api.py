"""A small HTTP server that speaks the part of the Kubernetes API which lists and watches EndpointSlices."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.serving import serving

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint(address: str, pod: str | None = None, **conditions: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"addresses": [address], "conditions": {"ready": True} | conditions}
    if pod is not None:
        said["targetRef"] = {"kind": "Pod", "name": pod}
    return said


class KubernetesApi:
    """Holds slices with resource versions; every change is sent to all watches, and replayed to later ones."""

    def __init__(self, token: str = "secret") -> None:  # noqa: S107 - a test's
        self.token = token
        self.version = 100
        self.oldest = 100  # a watch from before this is too old
        self.slices: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.lists = 0
        self.watches: list[str] = []
        self.status = 200
        self.url = ""
        self._changed = asyncio.Condition()
        self._cut = 0

    async def put(self, name: str, *endpoints: dict[str, Any], port: int = 8000, kind: str = "IPv4") -> None:
        new = name not in self.slices
        self.version += 1
        self.slices[name] = {
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "addressType": kind,
            "endpoints": list(endpoints),
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "metrics", "port": 9}],
        }
        await self._say({"type": "ADDED" if new else "MODIFIED", "object": self.slices[name]})

    async def delete(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._say({"type": "DELETED", "object": gone})

    async def bookmark(self) -> None:
        self.version += 5
        await self._say(
            {"type": "BOOKMARK", "object": {"metadata": {"name": "", "resourceVersion": str(self.version)}}}
        )

    async def forget(self) -> None:
        """Compact the history: who asks from before now is told that it is gone; running watches are told in band."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()
        await self._say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})

    async def end_watches(self) -> None:
        async with self._changed:
            self._cut += 1
            self._changed.notify_all()

    async def _say(self, event: dict[str, Any]) -> None:
        async with self._changed:
            self.history.append((self.version, json.loads(json.dumps(event))))
            self._changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status, "message": "no"}, status=self.status)
        assert request.query["labelSelector"] == "kubernetes.io/service-name=engines"
        if request.query.get("watch") != "true":
            self.lists += 1
            body = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
            return web.json_response(body)
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = request.query["resourceVersion"]
        self.watches.append(since)
        if int(since) < self.oldest:
            return web.json_response({"kind": "Status", "code": 410, "message": "too old"}, status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        sent, cut = int(since), self._cut
        while True:
            for version, event in list(self.history):
                if version > sent:
                    sent = version
                    line = json.dumps(event).encode() + b"\n"
                    await response.write(line[:20])  # events come in whatever pieces the network makes
                    await response.write(line[20:])
            async with self._changed:
                if cut != self._cut:
                    return response
                await self._changed.wait_for(
                    lambda: cut != self._cut or any(each[0] > sent for each in self.history)  # noqa: B023
                )

    @asynccontextmanager
    async def started(self) -> AsyncIterator["KubernetesApi"]:
        app = web.Application()
        app.router.add_get(PATH, self.answer)
        async with serving(app) as self.url:
            yield self


__all__ = ["KubernetesApi", "endpoint"]
