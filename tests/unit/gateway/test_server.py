"""What stands between uvicorn's request cycle and its connection."""

from gateway.server import Body, HeldWriter


class Transport:
    """Keeps what it is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.calls.append(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def writer() -> tuple[HeldWriter, Transport]:
    transport = Transport()
    return HeldWriter(transport), transport


def test_what_is_held_is_written_in_one_piece_and_in_order() -> None:
    held, transport = writer()
    held.write(b"first;")
    held.hold()
    held.write(b"head;")
    held.write(b"body;")
    assert transport.calls == [b"first;"]
    held.release()
    held.release()
    held.write(b"last")
    assert transport.calls == [b"first;", b"head;body;", b"last"]


def test_closing_writes_what_is_held_before() -> None:
    held, transport = writer()
    held.hold()
    held.write(b"head")
    held.close()
    assert (transport.calls, transport.closed, held.is_closing()) == ([b"head"], True, True)


def test_holding_twice_loses_nothing() -> None:
    held, transport = writer()
    held.hold()
    held.write(b"a")
    held.hold()
    held.write(b"b")
    held.release()
    assert transport.calls == [b"ab"]


def test_a_body_is_what_a_bytearray_would_be_and_one_piece_is_not_copied() -> None:
    piece = b"x" * 100
    body, plain = Body(), bytearray()
    assert (len(body), bytes(body)) == (0, b"")
    body += piece
    assert bytes(body) is piece
    plain += piece
    for more in (b"", b"y", b"zz" * 50):
        body += more
        plain += more
        assert (len(body), bytes(body)) == (len(plain), bytes(plain))
