"""Which waiting prompt goes before the rest of a long one: the shortest, within what the long one yields."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.scheduler_ir.pacing import MUCH_FEWER, LongPrompt, WaitingPrompt, overtaker
from tests.support.examples import examples

LONG = LongPrompt(left_tokens=60_000, yields_tokens=60_000)


def waiting(*tokens: int) -> list[WaitingPrompt]:
    return [WaitingPrompt(left_tokens=each) for each in tokens]


def test_the_prompt_with_the_fewest_tokens_left_overtakes_and_of_equals_the_first() -> None:
    assert overtaker(LONG, [], waiting(20_000, 5_000, 5_000)) == 1
    assert overtaker(LONG, [], []) is None


def test_a_prompt_with_more_than_half_the_tokens_left_does_not_overtake() -> None:
    assert overtaker(LONG, [], waiting(30_001)) is None
    assert overtaker(LONG, [], waiting(30_000)) == 0


def test_every_prompt_behind_yields_no_more_than_its_bound() -> None:
    spent = LongPrompt(left_tokens=60_000, yields_tokens=4_999)
    assert overtaker(spent, [], waiting(5_000, 4_999)) == 1
    assert overtaker(LONG, [spent], waiting(5_000)) is None


def test_a_prompt_does_not_overtake_a_more_important_one_at_any_place_behind() -> None:
    important = LongPrompt(left_tokens=60_000, yields_tokens=60_000, priority=1)
    assert overtaker(important, [], waiting(5_000)) is None
    assert overtaker(LONG, [important], waiting(5_000)) is None
    assert overtaker(important, [LONG], [WaitingPrompt(left_tokens=5_000, priority=1)]) == 0


_tokens = st.integers(0, 100_000)
_long = st.builds(LongPrompt, left_tokens=_tokens, yields_tokens=st.integers(-10, 100_000), priority=st.integers(-1, 1))
_waiting = st.builds(WaitingPrompt, left_tokens=_tokens, priority=st.integers(-1, 1))


@settings(max_examples=examples(200))
@given(_long, st.lists(_long, max_size=4), st.lists(_waiting, max_size=8))
def test_the_choice_is_the_first_least_of_those_that_are_allowed(
    active: LongPrompt, overtaken: list[LongPrompt], prompts: list[WaitingPrompt]
) -> None:
    allowed = [
        place
        for place, prompt in enumerate(prompts)
        if prompt.left_tokens > 0
        and MUCH_FEWER * prompt.left_tokens <= active.left_tokens
        and all(prompt.left_tokens <= behind.yields_tokens for behind in (active, *overtaken))
        and all(prompt.priority >= behind.priority for behind in (active, *overtaken))
    ]
    expected = min(allowed, key=lambda place: prompts[place].left_tokens, default=None)
    assert overtaker(active, overtaken, prompts) == expected
