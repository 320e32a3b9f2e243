"""``kvgate register``: keeps an engine registered at a gateway for as long as the engine is healthy.

Runs beside any engine, of whatever kind. While the engine answers its health check, its lease is renewed three times
within its life; when it stops doing so, the lease runs out by itself, and the gateway drains what it still can. A stop
signal says goodbye first, so that the gateway gives the engine nothing new from that moment.
"""

import asyncio
import os
import signal
from http import HTTPStatus
from typing import Annotated, Final
from urllib.parse import quote, urlsplit

import httpx2
import typer

from kvgate.admin.address import GATEWAY_URL, GatewayUrl
from kvgate.display import plain
from kvgate.failure import CommandError
from kvgate.renamed import deprecated

_RENEWALS: Final = 3
_LIMIT_S: Final = 10.0
_HOPELESS: Final = frozenset({400, 401, 404, 405, 409})
"""Answers that come again however often one asks."""


def register(  # noqa: PLR0913 - each is one option
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(help="Id of the instance; keep it over restarts.")],
    engine: Annotated[
        str | None, typer.Option(help="Address at which the gateway reaches the engine, like http://10.0.0.7:9001.")
    ] = None,
    url: GatewayUrl = GATEWAY_URL,
    gateway: Annotated[str | None, typer.Option(hidden=True)] = None,
    key: Annotated[
        str, typer.Option(envvar="KVGATE_REGISTRATION_KEY", help="The gateway's registration_key or admin key.")
    ],
    health: Annotated[
        str | None, typer.Option(help="URL of the engine's health check. Default: --engine with /health.")
    ] = None,
    ttl: Annotated[float, typer.Option(min=1, max=3600, help="Life of a lease in seconds.")] = 15.0,
) -> None:
    """Keep an engine registered at a gateway for as long as it is healthy."""
    engine, url = _addresses(engine, url, gateway, url_typed=_is_typed(context, "url"))
    for option, value in (("--engine", engine), ("--url", url)):
        if urlsplit(value).scheme not in {"http", "https"} or not urlsplit(value).hostname:
            raise CommandError(
                f"{option} {value} is not the address of a server", "write for example http://10.0.0.7:9001"
            )
    lease = f"{url.rstrip('/')}/admin/v1/instances/{quote(name, safe='')}/lease"
    check = health or f"{engine.rstrip('/')}/health"
    asyncio.run(Registration(lease, url=engine, key=key, health=check, ttl_s=ttl).run())


def _addresses(engine: str | None, url: str, gateway: str | None, *, url_typed: bool) -> tuple[str, str]:
    """Return the addresses of engine and gateway, also where they are given as earlier versions took them: --url for
    the engine, --gateway for the gateway. Raises ``CommandError`` without an engine.
    """
    if engine is not None:
        return engine, url if gateway is None else gateway
    if not url_typed:
        raise CommandError("no engine is given", "pass its address with --engine, like http://10.0.0.7:9001")
    deprecated("--url for the engine with --gateway for the gateway", "--engine for the engine and --url")
    return url, os.environ.get("KVGATE_URL", GATEWAY_URL) if gateway is None else gateway


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class Registration:
    """One engine's lease at one gateway."""

    def __init__(self, lease: str, *, url: str, key: str, health: str, ttl_s: float) -> None:
        self._lease = lease
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self._health = health
        self._ttl_s = ttl_s
        self._held = False
        self._last_text = ""

    async def run(self) -> None:
        """Renew until a stop signal; raises ``CommandError`` when the gateway will never take this engine."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with httpx2.AsyncClient(trust_env=False, timeout=min(_LIMIT_S, self._ttl_s)) as client:
            while not stop.is_set():
                await self._renew(client)
                try:
                    async with asyncio.timeout(self._ttl_s / _RENEWALS):
                        await stop.wait()
                except TimeoutError:
                    continue
            if self._held:
                await self._end(client)

    async def _renew(self, client: httpx2.AsyncClient) -> None:
        try:
            answer = await client.get(self._health)
            if answer.status_code not in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}:  # an engine may have no health check
                self._say(f"the engine is not healthy: {self._health} answered {answer.status_code}")
                return
        except (httpx2.HTTPError, OSError) as error:
            self._say(f"the engine does not answer at {self._health}: {error or type(error).__name__}")
            return
        try:
            body = {"url": self._url, "ttl_s": self._ttl_s}
            answer = await client.put(self._lease, json=body, headers=self._headers)
        except (httpx2.HTTPError, OSError) as error:
            self._say(f"no gateway answers at {self._lease}: {error or type(error).__name__}")
            return
        if answer.status_code == HTTPStatus.OK:
            self._held = True
            self._say(f"registered at {self._lease}")
        elif answer.status_code in _HOPELESS:
            raise CommandError(f"the gateway refuses this engine ({answer.status_code}): {answer.text[:500]}")
        else:
            self._say(f"the gateway answered {answer.status_code}: {answer.text[:500]}")

    async def _end(self, client: httpx2.AsyncClient) -> None:
        try:
            answer = await client.delete(self._lease, headers=self._headers)
            left = answer.status_code == HTTPStatus.NO_CONTENT
            self._say("deregistered" if left else f"deregistration answered {answer.status_code}")
        except (httpx2.HTTPError, OSError) as error:
            self._say(f"could not deregister: {error or type(error).__name__}")

    def _say(self, text: str) -> None:
        """Once for each change, not at every renewal."""
        if text != self._last_text:
            self._last_text = text
            plain(text)
