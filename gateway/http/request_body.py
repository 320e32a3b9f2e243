"""A request's body as the server gathers it."""

from typing import Self

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Body:
    """A request's body in the pieces that came, in place of uvicorn's ``bytearray``: mostly there is one, and it is not
    copied twice.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __iadd__(self, piece: bytes) -> Self:
        self._pieces.append(piece)
        self._size += len(piece)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def take_body(cycle: RequestResponseCycle) -> bytes | None:
    """Return a request's body, once, None unless all of it is there already. It is the request's own: a connection's
    ``cycle`` is that of the last one that was read, which may be waiting behind the one that is being answered.
    """
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    cycle.message_event.clear()
    body = bytes(cycle.body)
    cycle.body = bytearray()
    return body
