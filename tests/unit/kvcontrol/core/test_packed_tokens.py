"""Packed tokens are the tokens, to whoever looks at them and on the wire."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.packed_tokens import PackedTokens

ids = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=200)


@given(ids)
def test_they_are_a_sequence_of_the_same_ids(tokens: list[int]) -> None:
    packed = PackedTokens(token_bytes(tokens))
    assert packed == tokens
    assert packed == tuple(tokens)
    assert packed == PackedTokens(token_bytes(tokens))
    assert packed != [*tokens, 1]
    assert list(packed) == tokens
    assert packed[1:] == tuple(tokens[1:])
    assert len(packed) == len(tokens)
    assert hash(packed) == hash(tuple(tokens))


@given(ids)
def test_any_reader_of_msgpack_reads_them(tokens: list[int]) -> None:
    assert msgspec.msgpack.decode(PackedTokens(token_bytes(tokens)).msgpack()) == tokens


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes of tokens"):
        PackedTokens(b"123456")
