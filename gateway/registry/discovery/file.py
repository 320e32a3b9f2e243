"""A YAML or JSON file with a list of ``{id, url}``, read again whenever it changes.

The software that manages the machines writes it. The gateway reads the whole file or nothing: a file that can't be
read, is empty, or has an entry that is no instance, changes nothing and is reported once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import ClassVar

import yaml
from pydantic import TypeAdapter, ValidationError

from gateway.http.endpoint import endpoint_of
from gateway.registry.discovery.base import DiscoveryError
from gateway.registry.discovery.regular_file import NotRegularError, content_of, status_of
from gateway.registry.instance import InstanceSpec, Source
from gateway.settings import InstanceSettings
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.yaml_text import load_yaml

_MAX_BYTES = 4 << 20
_LIST = TypeAdapter(list[InstanceSettings])


class FileWatcher:
    """Looks every ``interval_s`` whether the file is another one (by inode, size and time)."""

    source: ClassVar[Source] = Source.FILE

    def __init__(self, path: Path, *, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s

    @property
    def place(self) -> str:
        return f"file {self._path}"

    async def watch(self) -> AsyncGenerator[Sequence[InstanceSpec], None]:
        seen: tuple[int, int, int] | None = None
        while True:
            try:
                status = await status_of(self._path)
                now = (status.st_ino, status.st_size, status.st_mtime_ns)
                if now != seen:
                    text = await content_of(self._path, most_bytes=_MAX_BYTES + 1)
                    specs = await asyncio.to_thread(self._parsed, text)
                    seen = now
                    yield specs
            except NotRegularError as error:
                raise DiscoveryError(f"{self.place} is {error}") from None
            except OSError as error:
                raise DiscoveryError(f"{self.place} can't be read: {error.strerror}") from None
            await asyncio.sleep(self._interval_s)

    def _parsed(self, text: bytes) -> Sequence[InstanceSpec]:
        if len(text) > _MAX_BYTES:
            raise DiscoveryError(f"{self.place} is longer than {_MAX_BYTES} bytes")
        try:
            found = load_yaml(text)
            if found is None:
                raise DiscoveryError(f"{self.place} is empty; a list without instances is written []")
            named = _LIST.validate_python(found)
        except yaml.YAMLError as error:
            raise DiscoveryError(f"{self.place} is not YAML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DiscoveryError(f"{self.place}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
        ids, places = Counter(each.id for each in named), Counter(endpoint_of(each.url) for each in named)
        for each in named:
            if ids[each.id] > 1:
                raise DiscoveryError(f"{self.place}: the id {each.id} appears twice")
            if places[endpoint_of(each.url)] > 1:
                raise DiscoveryError(f"{self.place}: the url {each.url} appears twice")
        return [
            InstanceSpec(id=InstanceId(each.id), url=each.url, source=self.source, role=each.role) for each in named
        ]
