"""Whether a URL answers 200."""

import asyncio
from typing import Any, Self

import aiohttp

PROBE_LIMIT_S = 5.0


class HttpProbe:
    """A ``supervisor.Probe`` over HTTP; use it as an asynchronous context manager."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Children are reached directly: a proxy of the environment is for other hosts.
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_LIMIT_S), trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, url: str) -> bool:
        if self._session is None:
            raise RuntimeError("the probe is used outside its context")
        try:
            async with self._session.get(url) as response:
                return response.status == 200  # noqa: PLR2004
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError):
            return False

    async def read(self, url: str) -> dict[str, Any]:
        """Return the JSON object that ``url`` answers with, whatever the status; empty when there is none."""
        if self._session is None:
            raise RuntimeError("the probe is used outside its context")
        try:
            async with self._session.get(url) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}


__all__ = ["HttpProbe"]
