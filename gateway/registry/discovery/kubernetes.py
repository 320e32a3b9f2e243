"""The EndpointSlices of one Service, listed and then watched over the Kubernetes API.

List, then watch from the list's resource version. A watch that ends is taken up where it was; one whose version is too
old (410 Gone) begins with a new list. An endpoint that isn't ready is no instance (yet); one that is *terminating* is
no longer one, which drains it: its pod finishes what it has, and gets nothing new, before it is killed.
Rejected: the official clients (thousands of generated classes for two GET requests) and lightkube 1.0, whose watch has
no limit on silence (a connection that a NAT forgot is waited for without end) and no pause before it asks again.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import httpx2
import msgspec

from gateway.registry.discovery.base import DiscoveryError, instance_name
from gateway.registry.discovery.regular_file import NotRegularError, content_of
from gateway.registry.instance import InstanceSpec, Source
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId

_MAX_LINE_BYTES = 8 << 20
_MAX_TOKEN_BYTES = 1 << 20
_WATCH_S = 300
_SILENCE_S = _WATCH_S + 30.0
_LIST_TIMEOUT_S = 30.0
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesAccess:
    """The address of the API server, and the credentials. The token is read for each request: it is rotated."""

    url: str
    token_file: Path | None
    ca_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePort:
    """A Service and the name of its port; without one, its only port."""

    namespace: str
    service: str
    port: str | None = None
    scheme: str = "http"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _TargetRef(msgspec.Struct, frozen=True):
    name: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _TargetRef | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    address_type: str = "IPv4"


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice]


class _WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _GoneError(Exception):
    """The resource version is too old to be watched from."""


class KubernetesWatcher:
    """Follows one Service. Needs ``get``, ``list`` and ``watch`` on ``endpointslices`` in its namespace."""

    source: ClassVar[Source] = Source.KUBERNETES

    def __init__(self, what: ServicePort, access: KubernetesAccess) -> None:
        self._what = what
        self._access = access

    @property
    def place(self) -> str:
        return f"Kubernetes service {self._what.namespace}/{self._what.service}"

    async def watch(self) -> AsyncGenerator[Sequence[InstanceSpec], None]:
        timeout = httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S)
        try:
            tls = await asyncio.to_thread(self._tls)
            async with httpx2.AsyncClient(verify=tls, timeout=timeout, trust_env=False) as client:
                while True:
                    listed = await self._list(client)
                    slices = {each.metadata.name: each for each in listed.items}
                    seen = self._specs(slices.values())
                    yield seen
                    try:
                        async for _ in self._changes(client, slices, listed.metadata.resource_version):
                            now = self._specs(slices.values())
                            if now != seen:
                                seen = now
                                yield now
                    except _GoneError:
                        continue
        except (httpx2.HTTPError, OSError, TimeoutError, *UNREADABLE) as error:
            raise DiscoveryError(f"{self.place} can't be watched: {type(error).__name__}: {error}") from None

    async def _list(self, client: httpx2.AsyncClient) -> _SliceList:
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            answer = await client.get(self._url(), headers=await self._headers())
        if answer.status_code != HTTPStatus.OK:
            raise self._refused(answer.status_code, answer.content)
        return msgspec.json.decode(answer.content, type=_SliceList)

    async def _changes(
        self, client: httpx2.AsyncClient, slices: dict[str, _Slice], version: str
    ) -> AsyncIterator[None]:
        """Apply changes to ``slices`` for ever and say so; a watch that ends in order is taken up again."""
        while True:
            more = f"&watch=true&allowWatchBookmarks=true&timeoutSeconds={_WATCH_S}&resourceVersion={quote(version)}"
            url = self._url() + more
            async with client.stream("GET", url, headers=await self._headers()) as answer:
                if answer.status_code == HTTPStatus.GONE:
                    raise _GoneError
                if answer.status_code != HTTPStatus.OK:
                    raise self._refused(answer.status_code, await answer.aread())
                async for line in _lines(answer.aiter_bytes()):
                    event = msgspec.json.decode(line, type=_WatchEvent)
                    if event.type == "ERROR":
                        status = msgspec.json.decode(event.object, type=_Status)
                        if status.code == HTTPStatus.GONE:
                            raise _GoneError
                        raise DiscoveryError(f"{self.place}: the watch failed: {status.code} {status.message}")
                    changed = msgspec.json.decode(event.object, type=_Slice)
                    version = changed.metadata.resource_version or version
                    if event.type == "BOOKMARK":
                        continue
                    if event.type == "DELETED":
                        slices.pop(changed.metadata.name, None)
                    else:
                        slices[changed.metadata.name] = changed
                    yield
            await asyncio.sleep(0.1)  # a server that ends every watch at once is not asked in a tight loop

    def _specs(self, slices: Iterable[_Slice]) -> Sequence[InstanceSpec]:
        specs: dict[str, InstanceSpec] = {}
        for each in slices:
            port = self._port(each.ports or [])
            if port is None or each.address_type == "FQDN":
                continue
            for endpoint in each.endpoints or []:
                if endpoint.conditions.terminating or endpoint.conditions.ready is False or not endpoint.addresses:
                    continue
                address = endpoint.addresses[0]
                host = f"[{address}]" if each.address_type == "IPv6" else address
                pod = endpoint.target_ref.name if endpoint.target_ref is not None else ""
                name = instance_name(pod) if pod else instance_name(address.replace(":", "."), port)
                url = f"{self._what.scheme}://{host}:{port}"
                specs[url] = InstanceSpec(id=InstanceId(name), url=url, source=self.source)
        return sorted(specs.values(), key=lambda spec: spec.id)

    def _port(self, ports: Sequence[_Port]) -> int | None:
        if self._what.port is None:
            return ports[0].port if len(ports) == 1 else None
        return next((each.port for each in ports if each.name == self._what.port), None)

    def _url(self) -> str:
        namespace, service = quote(self._what.namespace, safe=""), quote(self._what.service, safe="")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return f"{self._access.url.rstrip('/')}{path}?labelSelector=kubernetes.io%2Fservice-name%3D{service}"

    async def _headers(self) -> dict[str, str]:
        path = self._access.token_file
        if path is None:
            return {"accept": "application/json"}
        try:
            token = (await content_of(path, most_bytes=_MAX_TOKEN_BYTES)).decode("ascii").strip()
        except NotRegularError as error:
            raise DiscoveryError(f"{self.place}: the token file {path} is {error}") from None
        except UnicodeDecodeError:
            raise DiscoveryError(f"{self.place}: the token file {path} is not ASCII text") from None
        return {"accept": "application/json", "authorization": f"Bearer {token}"}

    def _tls(self) -> ssl.SSLContext | bool:
        if self._access.ca_file is None or not self._access.url.startswith("https:"):
            return True
        try:
            return ssl.create_default_context(cafile=self._access.ca_file)
        except OSError as error:
            raise DiscoveryError(f"{self.place}: {self._access.ca_file} can't be read: {error.strerror}") from None

    def _refused(self, status: int, body: bytes) -> DiscoveryError:
        try:
            detail = msgspec.json.decode(body, type=_Status).message
        except UNREADABLE:
            detail = ""
        return DiscoveryError(f"{self.place}: the API server answered {status} {detail}".rstrip())


async def _lines(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The stream's lines, whatever their length up to a bound."""
    held = b""
    async for data in content:
        *whole, held = (held + data).split(b"\n")
        if len(held) > _MAX_LINE_BYTES:
            raise DiscoveryError(f"an event of the watch is longer than {_MAX_LINE_BYTES} bytes")
        for line in whole:
            if line.strip():
                yield line
