"""What reading a request costs the event loop, with a tokenizer and without: counted calls, that no machine changes."""

import asyncio
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.tiny import write_tokenizer
from gateway.errors import InvalidRequestError, RateLimitedError
from gateway.fingerprint import ModelTokenizer, load_tokenizer
from gateway.requests.reader import INLINE_BYTES
from tests.support.body_shapes import SHAPES, Shape
from tests.support.examples import examples
from tests.support.work import steps
from tests.unit.gateway.requests.test_reader import Desk, desk_of, tenant

MOST_STEPS = 150_000
"""For one body, whatever it consists of: 50 ms and less, as a call takes a third of a microsecond."""
SMALL_STEPS = 3_000
"""Of the loop itself, and of work that doesn't grow."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """Remembers nothing, so that equal bodies cost the same."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("models") / "tiny"), 0)


@pytest.fixture(params=["tokenizer", "no tokenizer"])
def desk(request: pytest.FixtureRequest, tokenizer: ModelTokenizer) -> Iterator[Desk]:
    with desk_of(tokenizer if request.param == "tokenizer" else None) as made:
        yield made


async def read(desk: Desk, shape: Shape, body: bytes) -> None:
    """Do what the pipeline does with a body up to admission."""
    try:
        call = await desk.reader.parse(shape.operation, body, tenant())
        await desk.reader.fingerprint(call, tenant(), None)
    except (InvalidRequestError, RateLimitedError):
        return


async def up(desk: Desk) -> None:
    desk.up()


def work(desk: Desk, shape: Shape, body: bytes) -> int:
    """How many calls the event loop's thread makes for it; those of other threads don't count."""
    with asyncio.Runner() as runner:
        runner.run(up(desk))
        return steps(lambda: runner.run(read(desk, shape, body)))


@cache
def of_size(name: str, size: int) -> int:
    """About how many things make a body of so many bytes, and no more."""
    make = SHAPES[name].make
    few, more = len(make(300)), len(make(600))
    many = max(1, 300 + (size - few) * 300 // (more - few))
    while (found := len(make(many))) > size:
        many = min(many - 1, many * size // found)
    return many


@pytest.mark.parametrize("name", SHAPES)
def test_no_body_of_any_length_takes_the_event_loop_more_than_a_bounded_number_of_calls(desk: Desk, name: str) -> None:
    shape = SHAPES[name]
    for size in (INLINE_BYTES, 256 << 10, 512 << 10, 2 << 20):
        assert work(desk, shape, shape.make(of_size(name, size))) <= MOST_STEPS, size


def test_twice_as_many_things_take_the_event_loop_at_most_twice_as_many_calls(desk: Desk) -> None:
    @settings(max_examples=examples(200))
    @given(name=st.sampled_from(sorted(SHAPES)), size=st.integers(2_000, 300_000))
    def holds(name: str, size: int) -> None:
        shape = SHAPES[name]
        many = of_size(name, size)
        once, twice = (work(desk, shape, shape.make(each)) for each in (many, 2 * many))
        assert twice <= 2 * once + SMALL_STEPS

    holds()
