"""The page's files: read once, served with a policy that lets no script, style or address in but the gateway's own."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

PAGE: Final = "index.html"
_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again with the ETag, so that page and gateway are of one version
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file with the headers that it is served with."""

    body: bytes
    etag: str
    headers: Mapping[str, str]


class Assets:
    """All files by their path below ``/dashboard/``; only what lies in the folder at the start exists."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _asset(path)
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }
        if PAGE not in self._files:
            raise FileNotFoundError(f"the status page is not installed: {folder / PAGE} is missing")

    @property
    def page(self) -> Asset:
        return self._files[PAGE]

    @property
    def files(self) -> Mapping[str, Asset]:
        return MappingProxyType(self._files)

    def get(self, name: str) -> Asset | None:
        return self._files.get(name)


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Asset(
        body=body, etag=etag, headers=MappingProxyType(_HEADERS | {"content-type": _TYPES[path.suffix], "etag": etag})
    )
