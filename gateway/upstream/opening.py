"""The head of a streamed answer and its keep-alive comments, while an instance is silent.

A stream's head goes as soon as it is final that the client gets a stream: an instance has sent the head of one, or has
been silent for so long that the client must be told something. The instance is not final then. Until the first event
another one may take the request over, which a comment says; and what would have been an error is the event that ends
the stream.
"""

from collections.abc import Sequence
from http import HTTPStatus
from math import inf

from gateway.http.headers import Header, towards_client
from gateway.types import Dialect
from gateway.upstream.reply import Reply
from gateway.upstream.sse import EventScanner, Fault

_EVENT_STREAM = b"text/event-stream"
_HEAD: Sequence[Header] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)
_COMMENT = b": keep-alive\n\n"
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_NAMES = frozenset({b"x-kvgate-instance", b"x-kvgate-route"})


class Opening:
    """One request's, over all its attempts. ``begun`` says that the head has gone before the answer; ``waiting`` that
    nothing of an answer has followed it.
    """

    __slots__ = ("_answering", "_named", "_own", "_reply", "_sign", "after_s", "begun", "scanner")

    def __init__(self, reply: Reply, scanner: EventScanner, *, dialect: Dialect, after_s: float) -> None:
        """``after_s`` is the silence after which a sign of life is sent, 0 for never."""
        self._reply = reply
        self._own: Sequence[Header] = ()
        self._named: Sequence[Header] = ()
        self._answering = False
        self._sign = _PING if dialect is Dialect.ANTHROPIC else _COMMENT
        self.after_s = after_s or inf
        self.begun = False
        self.scanner = scanner

    @property
    def waiting(self) -> bool:
        return self.begun and not self._answering

    def attempted(self, own_headers: Sequence[Header]) -> None:
        """Note the headers that name the instance of this attempt."""
        self._own = own_headers

    async def headed(self, status: int, headers: Sequence[Header]) -> None:
        """An instance's head has come, and no data behind it."""
        if self.begun or status != HTTPStatus.OK or not _is_plain_stream(headers):
            return
        own = {name for name, _ in self._own}
        await self._begin([each for each in towards_client(headers) if each[0] not in own])
        self._reply.flush()

    async def silent(self) -> None:
        """Nothing has come for ``after_s``, before the answer or within it."""
        if not self.begun and not self._answering:
            await self._begin(_HEAD)
        if not self.scanner.torn:  # within an event it would be a part of that
            await self._reply.send(self._sign)

    async def answer(self, status: int, headers: Sequence[Header]) -> None:
        """An instance's answer begins."""
        self._answering = True
        if not self.begun:
            await self._reply.start(status, headers)
        elif self._own != self._named:
            text = "; ".join(f"{name.decode()}: {value.decode()}" for name, value in self._own if name in _NAMES)
            await self._reply.send(f": {text}\n\n".encode())

    async def end(self, fault: Fault) -> None:
        """End a stream whose answer never began."""
        self._answering = True
        await self._reply.finish(self.scanner.ending(fault))

    async def _begin(self, headers: Sequence[Header]) -> None:
        self.begun = True
        self._named = self._own
        await self._reply.start(HTTPStatus.OK, [*headers, *self._own])


def _is_plain_stream(headers: Sequence[Header]) -> bool:
    kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
    return kinds == [_EVENT_STREAM] and not any(name == b"content-encoding" for name, _ in headers)
