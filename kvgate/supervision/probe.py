"""Whether a URL answers 200."""

from http import HTTPStatus
from typing import Any, Self

import httpx2

PROBE_LIMIT_S = 5.0


class HttpProbe:
    """A ``supervisor.Probe`` over HTTP; use it as an asynchronous context manager."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        # Children are reached directly: a proxy of the environment is for other hosts.
        self._client = httpx2.AsyncClient(timeout=PROBE_LIMIT_S, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def __call__(self, url: str) -> bool:
        if self._client is None:
            raise RuntimeError("the probe is used outside its context")
        try:
            response = await self._client.get(url)
        except (httpx2.HTTPError, OSError):
            return False
        return response.status_code == HTTPStatus.OK

    async def read(self, url: str) -> dict[str, Any]:
        """Return the JSON object that ``url`` answers with, whatever the status; empty when there is none."""
        if self._client is None:
            raise RuntimeError("the probe is used outside its context")
        try:
            answer = (await self._client.get(url)).json()
        except (httpx2.HTTPError, OSError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}
