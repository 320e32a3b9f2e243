"""A request's body as it is gathered."""

from gateway.http.request_body import Body


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
