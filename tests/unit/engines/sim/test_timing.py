"""The time model is the sum of its steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.sim.timing import TimeModel
from tests.support.simulated import TIME

MODELS = st.builds(
    TimeModel,
    step_s=st.floats(1e-3, 1),
    token_s=st.floats(0, 1e-2),
    pair_s=st.floats(0, 1e-6),
    context_s=st.floats(0, 1e-5),
    decode_step_s=st.floats(1e-3, 1),
    sequence_s=st.floats(0, 1e-2),
    decode_context_s=st.floats(0, 1e-4),
)


@given(MODELS, st.integers(1, 40), st.integers(1, 16), st.integers(0, 100_000))
def test_a_span_takes_what_its_steps_take(model: TimeModel, steps: int, sequences: int, context: int) -> None:
    one_by_one = sum(model.span_s(1, sequences, context + step * sequences) for step in range(steps))
    assert model.span_s(steps, sequences, context) == pytest.approx(one_by_one)


@given(MODELS, st.floats(0, 500), st.integers(1, 64), st.integers(0, 1_000_000))
def test_the_steps_within_a_time_are_those_that_are_over_then(
    model: TimeModel, seconds: float, sequences: int, context: int
) -> None:
    steps = model.steps_within(seconds, sequences, context)
    assert model.span_s(steps, sequences, context) <= seconds or steps == 0
    assert model.span_s(steps + 1, sequences, context) > seconds


def test_a_prompt_takes_what_its_chunks_take() -> None:
    assert TIME.prompt_s(70, 10, 32) == pytest.approx(
        TIME.prefill_s([(32, 10)]) + TIME.prefill_s([(32, 42)]) + TIME.prefill_s([(6, 74)])
    )


@pytest.mark.parametrize(("field", "value"), [("step_s", 0.0), ("pair_s", -1.0), ("decode_step_s", float("nan"))])
def test_what_can_not_be_a_time_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        TimeModel(**{name: getattr(TIME, name) for name in TIME.__slots__} | {field: value})
