"""Where a request's keys are looked for."""

import pytest

from gateway.admission import keys_of

BASIC = (b"authorization", b"Basic dXNlcjpwdw==")


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ([], ()),
        ([(b"authorization", b"Bearer k1")], (b"k1",)),
        ([(b"authorization", b"  bearer   k1  ")], (b"k1",)),
        ([(b"x-api-key", b" k1 ")], (b"k1",)),
        ([BASIC], ()),
        ([BASIC, (b"x-api-key", b"k1")], (b"k1",)),
        ([(b"x-api-key", b"k1"), BASIC], (b"k1",)),
        ([BASIC, (b"authorization", b"Bearer k1")], (b"k1",)),
        ([(b"authorization", b"Digest a=b, c=d"), (b"x-api-key", b"k1")], (b"k1",)),
        ([(b"authorization", b"Bearer"), (b"x-api-key", b"k1")], (b"k1",)),
        ([(b"authorization", b"Bearer  "), (b"x-api-key", b"")], ()),
        ([(b"authorization", b""), (b"authorization", b"k1")], ()),
        ([(b"x-api-key", b"k2"), (b"authorization", b"Bearer k1")], (b"k1", b"k2")),
        ([(b"authorization", b"Bearer k1"), (b"x-api-key", b"k1")], (b"k1",)),
        ([(b"authorization", b"Bearer k1"), (b"authorization", b"Bearer k2")], (b"k1", b"k2")),
        ([(b"authorization", b"Bearer k1 k1")], (b"k1 k1",)),
    ],
)
def test_the_keys_of_a_request(headers: list[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> None:
    assert keys_of([(b"host", b"x"), *headers, (b"cookie", b"k9")]) == keys
