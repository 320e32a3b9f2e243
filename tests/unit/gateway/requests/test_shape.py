"""What a body may consist of, and what is made of it."""

import sys
import tracemalloc
from time import monotonic
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.fair_threads import FairThreads
from gateway.errors import InvalidRequestError
from gateway.fingerprint import Fingerprinter
from gateway.http.body_memory import BodyMemory
from gateway.requests.call import parse_call
from gateway.requests.reader import INLINE_BYTES
from gateway.requests.shape import MOST_ESCAPES, MOST_FIELDS, MOST_ITEMS, check_shape, structure
from gateway.types import Operation
from tests.support.body_shapes import SHAPES, chat

TIMES = 64
"""Bytes of memory for each byte of a body, at most; an object with one field takes some thirty."""
MOST_STEPS = 150_000
"""Calls for a body that is read on the event loop: a third of a microsecond each."""


def with_field(text: str) -> bytes:
    return chat()[:-1] + f',"x":{text}}}'.encode()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[" + "{}," * MOST_FIELDS + "{}]", "objects and fields"),
        ("{" + ",".join(f'"{number}":1' for number in range(MOST_FIELDS)) + "}", "objects and fields"),
        ("[" + "1," * MOST_ITEMS + "1]", "items in its lists"),
        ("[" + "[]," * (MOST_ITEMS // 2) + "[]]", "items in its lists"),
        ('"' + "\\n" * (MOST_ESCAPES + 1) + '"', "escapes in its texts"),
        ('"' + '\\"' * (MOST_FIELDS * 3), None),
        ('"' + '\\"' * (MOST_FIELDS * 3) + "{:,[" * MOST_FIELDS + "\\", None),
        ('"' + "{:,[" * MOST_ITEMS + '"', None),
        ('"' + '{\\"a\\": [1, 2]}' * MOST_FIELDS + '"', None),
        ("[" + ",".join(["12345"] * (MOST_ITEMS - 100)) + "]", None),
    ],
)
def test_many_objects_are_refused_and_long_texts_and_lists_of_ids_are_not(text: str, what: str | None) -> None:
    if what is None:
        check_shape(with_field(text))
    else:
        with pytest.raises(InvalidRequestError, match=f"more than \\d+ {what}") as caught:
            check_shape(with_field(text))
        assert caught.value.reason == "body_too_complex"


@given(
    text=st.lists(st.sampled_from(['"', "\\", "{", ":", "[", ",", "a", '\\"', "{}", '":']), max_size=60).map("".join),
    times=st.integers(1, 3),
)
def test_no_text_makes_the_look_at_it_fail(text: str, times: int) -> None:
    check_shape((text * times).encode() + b'"' + b"x" * MOST_FIELDS)


def marks_outside_of_texts(body: bytes) -> bytes:
    """``structure``, a byte at a time."""
    marks, in_text, escaped = bytearray(), False, False
    for byte in body:
        if in_text:
            in_text = escaped or byte != ord('"')
            escaped = not escaped and byte == ord("\\")
        elif byte == ord('"'):
            in_text = True
        elif byte in b"{:[,":
            marks.append(byte)
    return bytes(marks)


@given(
    parts=st.lists(st.sampled_from(['"', "\\", "{", ":", "[", ",", "a", '\\"', "\\\\", '"abcdefg"', '"{\\"a\\":1}"'])),
    at_once=st.integers(2, 20),
)
def test_what_stands_in_texts_is_known_however_little_is_looked_at_at_once(parts: list[str], at_once: int) -> None:
    body = "".join(parts).encode()
    assert bytes(structure(body, at_once)) == marks_outside_of_texts(body)


@pytest.mark.parametrize("name", SHAPES)
def test_reading_a_body_takes_a_bounded_multiple_of_its_length(name: str) -> None:
    shape = SHAPES[name]
    body = shape.make(shape.least * 8)
    tracemalloc.start()
    try:
        call = _read(shape.operation, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del call
    assert peak <= TIMES * len(body) + (64 << 10)


@pytest.mark.parametrize("text", ["[" + "{}," * (1 << 20) + "{}]", "[" + "[]," * 600_000 + "[]]"])
def test_a_body_that_would_take_a_large_multiple_is_refused_before_anything_is_made_of_it(text: str) -> None:
    body = with_field(text)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            parse_call(Operation.CHAT, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(body)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_read_on_the_event_loop_takes_a_bounded_number_of_steps(name: str) -> None:
    shape = SHAPES[name]
    many = shape.least
    while len(shape.make(many)) > INLINE_BYTES:
        many //= 2
    many = many * INLINE_BYTES // len(shape.make(many)) * 7 // 8
    body = shape.make(many)
    assert len(body) <= INLINE_BYTES
    steps = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal steps
        steps += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        _read(shape.operation, body)
    finally:
        sys.setprofile(None)
    assert steps < MOST_STEPS


def _read(operation: Operation, body: bytes) -> object:
    try:
        call = parse_call(operation, body)
    except InvalidRequestError:
        return None
    with FairThreads(1, memory=BodyMemory(1 << 30, shed=print), bound=1, ageing_s=1.0, clock=monotonic) as threads:
        return call, Fingerprinter(None, threads)._encode(call.prompt, "salt")
