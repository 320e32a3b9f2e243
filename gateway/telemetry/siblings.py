"""One ``/metrics`` for several workers on one host.

A scrape reaches any one of them. That one asks the others over their Unix sockets and answers with all series, each
with the label ``worker``: sums are Prometheus' work, and a counter never jumps because another worker was asked.
``kvgate_worker_up`` says which of them answered.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx2

from gateway.http.client import FETCH_ERRORS, fetch, make_client
from kvcontrol.series import gateway as catalogue

OWN_QUERY: Final = "worker=own"
_LIMIT_S: Final = 2.0
_MAX_BYTES: Final = 16 << 20
_SAMPLE: Final = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})? (\S+(?: # \{.*)?)$"
)
_HEAD: Final = re.compile(r"^# (?:HELP|TYPE|UNIT) (\S+) ")
_END: Final = "# EOF"
_UP: Final = catalogue.WORKER_UP


class Siblings:
    """The workers of one host: ``count`` of them, each with a socket in ``folder``; ``own`` is this one's number."""

    def __init__(self, folder: Path, *, own: int, count: int) -> None:
        self._folder = folder
        self.own = own
        self.count = count

    @property
    def name(self) -> str:
        """What these workers are called together: no others are called so."""
        return blake2b(str(self._folder).encode(), digest_size=4, person=b"kvgate.workers").hexdigest()

    async def exposition(self, own: bytes, accept: str, authorization: str) -> bytes:
        """Return the series of all workers in one format; ``own`` are this one's, the others are asked with the
        scrape's own headers ``accept`` and ``authorization``.
        """
        others = [number for number in range(self.count) if number != self.own]
        headers = {"accept": accept or "*/*", "authorization": authorization}
        answers = asyncio.gather(*(self._ask(each, headers) for each in others))
        texts = dict(zip(others, await answers, strict=True))
        texts[self.own] = own.decode()
        return merged({number: texts[number] for number in sorted(texts)}).encode()

    async def _ask(self, number: int, headers: Mapping[str, str]) -> str | None:
        socket = socket_path(self._folder, number)
        url = f"http://localhost/metrics?{OWN_QUERY}"
        try:
            async with asyncio.timeout(_LIMIT_S), make_client(_to(socket), connect_s=_LIMIT_S) as client:
                status, body = await fetch(client, "GET", url, limit_bytes=_MAX_BYTES, headers=headers)
        except (*FETCH_ERRORS, TimeoutError):
            return None
        return body.decode() if status == HTTPStatus.OK else None


def _to(socket: Path) -> httpx2.AsyncHTTPTransport:
    unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to load certificates would take some 50 ms
    return httpx2.AsyncHTTPTransport(uds=str(socket), verify=unused, trust_env=False)


def socket_path(folder: Path, number: int) -> Path:
    """Return where a worker listens for its siblings."""
    return folder / f"{number}.sock"


def merged(texts: Mapping[int, str | None]) -> str:
    """Return one exposition of several, each sample with its worker; None is a worker that did not answer."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in (text or "").splitlines():
            if head := _HEAD.match(line):
                if head[1] != family:
                    family = head[1]
                    known = family in heads
                if not known:
                    heads.setdefault(family, []).append(line)
            elif sample := _SAMPLE.match(line):
                labels = f'worker="{number}"' + (f",{sample[2]}" if sample[2] else "")
                samples.setdefault(family, []).append(f"{sample[1]}{{{labels}}} {sample[3]}")
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    lines += [f"# HELP {_UP.name} {_UP.help}", f"# TYPE {_UP.name} {_UP.kind}"]
    lines += [f'{_UP.name}{{worker="{number}"}} {int(text is not None)}' for number, text in texts.items()]
    if any(text is not None and text.endswith(f"{_END}\n") for text in texts.values()):
        lines.append(_END)
    return "\n".join(lines) + "\n"
