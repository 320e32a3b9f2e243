"""An instance that is put to sleep and woken over HTTP while it answers, and what its clients got."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcontrol.core.control import CACHE_SALT_HEADER

WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Got:
    """The answer's status and its body."""

    status: int
    body: Any

    @property
    def tokens(self) -> list[int]:
        return list(self.body["output_ids"])


def post(url: str, path: str, body: Mapping[str, Any] | None = None, *, salt: str = "") -> Got:
    """Send JSON, or no body, and return what came, whatever its status."""
    headers = {"content-type": "application/json"} | ({CACHE_SALT_HEADER: salt} if salt else {})
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, headers)  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S) as response:  # noqa: S310 - our own
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    return Got(status, json.loads(text) if text else None)


def generate(url: str, prompt: Sequence[int], *, new_tokens: int, salt: str) -> Got:
    """Ask greedily for tokens."""
    body = {"input_ids": list(prompt), "max_tokens": new_tokens, "temperature": 0.0, "top_k": 1, "ignore_eos": True}
    return post(url, "/generate", body, salt=salt)


class Beside(threading.Thread):
    """A request on a thread of its own; ``got`` once it is joined."""

    def __init__(self, url: str, path: str, body: Mapping[str, Any] | None = None, *, salt: str = "") -> None:
        super().__init__()
        self._asked = (url, path, body, salt)
        self.got: Got | None = None
        self.start()

    def run(self) -> None:
        url, path, body, salt = self._asked
        self.got = post(url, path, body, salt=salt)

    def result(self) -> Got:
        """Wait for the answer and return it."""
        self.join(WITHIN_S)
        assert self.got is not None, "no answer came"
        return self.got


class Stream:
    """A chat's stream that has begun."""

    def __init__(self, url: str, text: str, *, new_tokens: int) -> None:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(  # noqa: S310 - our own
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        self._response = urllib.request.urlopen(request, timeout=WITHIN_S)  # noqa: S310 - our own
        self._first = self._response.readline()

    def rest(self) -> str:
        """Read to the end and return all of it."""
        with self._response:
            return (self._first + self._response.read()).decode()


__all__ = ["Beside", "Got", "Stream", "generate", "post"]
