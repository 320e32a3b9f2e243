"""Reading a body costs no more than its length, whatever it consists of."""

import gc
from collections.abc import Iterator
from time import monotonic, thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_threads import FairThreads
from gateway.errors import InvalidRequestError
from gateway.fingerprint import Fingerprinter
from gateway.http.body_memory import BodyMemory
from gateway.requests.call import parse_call
from gateway.types import Operation
from tests.support.body_shapes import SHAPES, chat

LONGER = 8
MOST = LONGER * 3
"""A quadratic step would take 64 times as long, one that is linear 8 times: what lies between is a busy machine."""
ROUNDS = 12


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """What the collector does meanwhile is on account of what the test holds."""
    gc.disable()
    yield
    gc.enable()


def read(operation: Operation, body: bytes) -> float:
    """Do what is done with each body; return the processor time that this thread took."""
    began_s = thread_time()
    try:
        call = parse_call(operation, body)
    except InvalidRequestError:
        return thread_time() - began_s
    with FairThreads(1, memory=BodyMemory(1 << 30, shed=print), bound=1, ageing_s=1.0, clock=monotonic) as threads:
        Fingerprinter(None, threads)._encode(call.prompt, "salt")
    return thread_time() - began_s


def growth(operation: Operation, short: bytes, long: bytes) -> float:
    """Return how many times as long the long body takes; what disturbs a round is no part of the least times."""
    least = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        least = [min(before, read(operation, body)) for before, body in zip(least, (short, long), strict=True)]
        if least[1] <= MOST * least[0]:
            break
    return least[1] / least[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_body_of_eight_times_as_many_things_takes_about_eight_times_as_long(name: str) -> None:
    shape = SHAPES[name]
    assert growth(shape.operation, shape.make(shape.least), shape.make(shape.least * LONGER)) <= MOST


FIELDS = {
    "escaped": lambda n: ",".join(f'"\\u0061{each:x}":1' for each in range(n)),
    "plain": lambda n: ",".join(f'"b{each:x}":1' for each in range(n)),
    "spaced": lambda n: ",".join(f' "c{each:x}" : [ ] ' for each in range(n)),
    "ids": lambda n: f'"input_ids":[{",".join(["7"] * n)}]',
    "tools": lambda n: f'"tools":[{",".join(["{}"] * n)}]',
    "texts": lambda n: '"d":"' + "\\n" * n + '"',
    "numbers": lambda n: '"e":' + "9" * n,
}


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True), many=st.integers(500, 1500)
)
def test_so_does_one_of_several_kinds_of_things(kinds: list[str], many: int) -> None:
    def body(times: int) -> bytes:
        return chat()[:-1] + ("," + ",".join(FIELDS[kind](many * times) for kind in kinds) + "}").encode()

    assert growth(Operation.CHAT, body(1), body(LONGER)) <= MOST
