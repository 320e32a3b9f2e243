"""Talks to a gateway's ``/admin/v1``; what goes wrong becomes a ``CommandError`` with the gateway's own words."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from gateway.state.admin_key import FILE_NAME
from kvgate.failure import CommandError

_LIMIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: its body, None when it has none, and the version to change it from."""

    body: Any
    etag: str | None


class WrongKeyError(CommandError):
    """The gateway does not take this key."""


class OvertakenError(CommandError):
    """The document has another version than the one that the call was meant for, or is there already."""


class AdminClient:
    """One gateway and the admin key for it."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CommandError(f"--url {url} is not a gateway's address", "write for example http://127.0.0.1:8000")
        self._base = url.rstrip("/") + "/admin/v1"
        self._key = key
        is_tls = parts.scheme == "https"  # to load certificates takes some 30 ms: once, and only where they are used
        self._tls = ssl.create_default_context() if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Return a success; raises ``CommandError`` for anything else."""
        try:
            with httpx2.Client(verify=self._tls, trust_env=False, timeout=_LIMIT_S) as client:
                answer = client.request(
                    method,
                    self._base + path,
                    json=body,
                    headers={"authorization": f"Bearer {self._key}"} | dict(headers or {}),
                )
            if not answer.is_success:
                raise _refused(answer)
            return Reply(body=answer.json() if answer.content else None, etag=answer.headers.get("etag"))
        except (httpx2.ProtocolError, ValueError) as error:
            raise CommandError(f"{self._base} does not answer like a kvgate gateway: {error}", "check --url") from None
        except httpx2.HTTPError as error:
            raise CommandError(
                f"no gateway answers at {self._base}: {error or type(error).__name__}",
                "start the gateway, or pass its address with --url",
            ) from None


def find_key(given: str | None, state_dir: Path) -> str:
    """Return the admin key: the one given, or the one that the gateway keeps in its state folder."""
    if given:
        return given
    path = state_dir / FILE_NAME
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"no admin key: {path} cannot be read ({error})",
            "pass the key with --admin-key or KVGATE_ADMIN_KEY, or the gateway's folder with --state-dir",
        ) from None


def _refused(answer: httpx2.Response) -> CommandError:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {answer.status_code}"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return WrongKeyError(str(message), "use the key from the gateway's state folder or its admin_key setting")
    if answer.status_code == HTTPStatus.PRECONDITION_FAILED:
        return OvertakenError(str(message))
    return CommandError(str(message))
