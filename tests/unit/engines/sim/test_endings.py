"""Where a simulated engine's answers end, whatever ends them, and what of them is told."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.tiny import build_tiny
from engines.requests.limits import RefusedError
from engines.sim.endings import Answers, Drawn, Ending
from engines.sim.text import SimTokenizer, TextError
from tests.support.examples import examples

PROMPT = [5, 6, 7]
ROOM = 100


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SimTokenizer:
    return SimTokenizer(build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="module")
def answers(tokenizer: SimTokenizer) -> Answers:
    return Answers(tokenizer, seed=3, answer_tokens=20, capacity_tokens=ROOM)


ASKED = st.builds(
    Ending,
    most_tokens=st.none() | st.integers(1, 200),
    least_tokens=st.integers(0, 30),
    ignores_eos=st.booleans(),
    shows_stop=st.booleans(),
)


@given(request=ASKED, places=st.sets(st.integers(0, 40), max_size=4), choice=st.integers(0, 2))
@settings(max_examples=examples(60), deadline=None)
def test_an_answer_ends_at_the_first_stop_token_that_may_come(
    tokenizer: SimTokenizer, answers: Answers, request: Ending, places: set[int], choice: int
) -> None:
    plain = answers.draw(PROMPT, Ending(most_tokens=60), choice=choice).words
    stop = {plain[place] for place in places}
    room = min(ROOM - len(PROMPT), request.most_tokens or ROOM)
    least = min(request.least_tokens, room)
    ending = replace(request, least_tokens=least, stop_ids=tuple(stop))
    drawn = answers.draw(PROMPT, ending, choice=choice)
    assert drawn == answers.draw(PROMPT, ending, choice=choice)
    end = tokenizer.end_token
    ends = {*stop, end}
    assert drawn.words == drawn.generated[: len(drawn.words)]
    if drawn.reason == "stop":
        assert drawn.generated[-1] in ends
        assert (len(drawn.generated), not request.ignores_eos) == (len(drawn.words) + 1, True)
        assert drawn.last == ([drawn.generated[-1]] if request.shows_stop else [])
        if drawn.generated[-1] == end:  # its own
            assert (request.most_tokens, len(drawn.words)) == (None, max(20, least))
    else:
        assert (drawn.generated, drawn.last) == (drawn.words, [])
        assert len(drawn.words) == room
    assert least <= len(drawn.words) <= room
    assert not ends & set(drawn.words)
    if not request.ignores_eos:  # what may be said is what would have been said
        assert drawn.words[least:] == plain[least : len(drawn.words)] or len(drawn.words) > 60


def test_choices_differ_and_the_first_is_the_only_answer(answers: Answers) -> None:
    ending = Ending(most_tokens=9)
    first, *others = [answers.draw(PROMPT, ending, choice=choice) for choice in range(4)]
    assert first == answers.draw(PROMPT, ending) == Drawn(first.words, first.words, [], "length")
    assert len({tuple(each.words) for each in (first, *others)}) == 4


@pytest.mark.parametrize(
    ("prompt", "ending", "words"),
    [
        ([1] * ROOM, Ending(most_tokens=1), "model context length .100."),
        ([], Ending(most_tokens=1), "the prompt has no tokens"),
        ([1024], Ending(most_tokens=1), "input_ids holds 1024"),
        ([1], Ending(most_tokens=1, stop_ids=(-1,)), "stop_token_ids holds -1"),
        ([1], Ending(most_tokens=1, stop_ids=(2**80,)), "stop_token_ids holds 12"),
        ([1], Ending(most_tokens=3, least_tokens=4), "min_new_tokens is 4; 0 to 3"),
        ([1], Ending(most_tokens=1, stop_ids=tuple(range(1024)), ignores_eos=True), "every token of the model"),
    ],
)
def test_what_can_not_be_is_refused(answers: Answers, prompt: list[int], ending: Ending, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        answers.draw(prompt, ending)


def test_without_words_there_is_no_answer(tokenizer: SimTokenizer, answers: Answers) -> None:
    with pytest.raises(TextError, match="every word"):
        answers.draw(PROMPT, Ending(most_tokens=2, stop_ids=tuple(tokenizer.words), least_tokens=1))
