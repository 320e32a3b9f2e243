from gateway.http.headers import towards_client, towards_engine


def test_what_the_engine_never_gets() -> None:
    dropped = [
        (b"Connection", b"close, X-Named"),
        (b"x-named", b"1"),
        (b"Keep-Alive", b"5"),
        (b"TE", b"trailers"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Upgrade", b"h2c"),
        (b"Proxy-Authorization", b"x"),
        (b"Host", b"x"),
        (b"Content-Length", b"1"),
        (b"Authorization", b"Bearer x"),
        (b"Accept-Encoding", b"gzip"),
        (b"Expect", b"100-continue"),
        (b"X-KvGate-Cache-Salt", b"s"),
        (b"x-kvgate-anything", b"s"),
    ]
    kept = [(b"X-Custom", b"1"), (b"traceparent", b"t"), (b"Cookie", b"c"), (b"Content-Type", b"application/json")]
    assert towards_engine([*dropped, *kept]) == [(name.lower(), value) for name, value in kept]


def test_header_values_leave_as_the_bytes_that_came() -> None:
    for value in ("grün".encode(), b"\xff", b"plain"):
        assert towards_engine([(b"x-a", value)]) == [(b"x-a", value)]


def test_what_the_client_never_gets_and_repeated_headers_stay() -> None:
    headers = [
        (b"Set-Cookie", b"a"),
        (b"Set-Cookie", b"b"),
        (b"Retry-After", b"7"),
        (b"Date", b"d"),
        (b"Server", b"uvicorn"),
        (b"Content-Length", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"X-KVGATE-Instance", b"forged"),
        (b"X-Request-Id", b"engine's"),
    ]
    assert towards_client(headers) == [(b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"retry-after", b"7")]
