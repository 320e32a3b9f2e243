"""By which a request that has been here before is known: the header ``Via`` (RFC 9110, section 7.6.3).

Every request to an instance says who passed it on. An instance may be another gateway, and that one's instance this
one: such a request would go round until its time is over.
"""

from collections.abc import Iterable

from gateway.errors import LoopError
from gateway.http.headers import Header

_NAME = b"via"
_OWN = "kvgate-"


class Via:
    """The gateway's own entry in ``Via``; ``name`` is unique, and the same in all of its workers."""

    def __init__(self, name: str) -> None:
        self._name = f"{_OWN}{name}".encode()
        self._entries = {version: (_NAME, f"{version} {_OWN}{name}".encode()) for version in ("1.0", "1.1")}

    def entry(self, http_version: str = "1.1") -> Header:
        """Return the header that names this gateway and the version of HTTP."""
        return self._entries.get(http_version) or self._entries["1.1"]

    def text(self) -> dict[str, str]:
        """Return the entry of a request of this gateway's own."""
        name, value = self.entry()
        return {name.decode(): value.decode()}

    def check(self, headers: Iterable[Header]) -> None:
        """Raise ``LoopError`` where a request has come by this gateway before. Names are in lower case."""
        for name, value in headers:
            if name == _NAME and any(self._name in each.split()[1:2] for each in value.split(b",")):
                raise LoopError(
                    "request loop detected: an instance, or a server behind it, is this gateway; check the "
                    "instance urls"
                )
