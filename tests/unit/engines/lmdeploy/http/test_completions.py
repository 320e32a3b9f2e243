"""What LMDeploy is given of a body of ``/v1/completions``."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.lmdeploy.http.completions import check_request, numbered
from engines.requests.completions import MOST_ANSWERS


@dataclass
class Asked:
    prompt: Any
    n: int = 1


def checked(prompt: Any, n: int = 1) -> tuple[str, Any]:
    asked = Asked(prompt, n)
    return check_request(lambda _request, _context: "")(asked, None), asked.prompt


TEXT = st.text(min_size=1, max_size=3)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=200)


@given(prompts=st.lists(TEXT, min_size=1, max_size=200) | st.lists(IDS, min_size=1, max_size=20), n=st.integers(1, 140))
def test_each_prompt_has_its_answers_one_after_the_other_or_the_request_is_refused(prompts: list[Any], n: int) -> None:
    problem, became = checked(prompts, n)
    if len(prompts) * n > MOST_ANSWERS:
        assert f"at most {MOST_ANSWERS} are allowed" in problem
        assert became is prompts
    else:
        assert problem == ""
        assert became == [prompt for prompt in prompts for _ in range(n)]


@given(ids=IDS)
def test_a_list_of_token_ids_is_one_prompt(ids: list[int]) -> None:
    assert checked(ids) == ("", [ids])
    assert checked(ids, 2) == ("", [ids, ids])


def test_a_text_alone_stays_as_it_is_with_its_session() -> None:
    assert checked("a") == ("", "a")
    assert checked("a", 3) == ("", ["a", "a", "a"])


ANSWERS = st.lists(
    st.lists(st.sampled_from(["a", '"index": 0', "\n\ndata: [DONE]", "é"]), max_size=4), min_size=1, max_size=5
)


async def streamed(answers: list[list[str]]) -> AsyncIterator[str]:
    """A stream of LMDeploy's: one answer after the other, each with index 0."""

    def event(**choice: Any) -> str:
        return f"data: {json.dumps({'id': '1', 'choices': [{'index': 0, **choice}]})}\n\n"

    for texts in answers:
        for text in texts:
            yield event(text=text)
        yield event(text="", finish_reason="stop")
    yield f"data: {json.dumps({'id': '1', 'choices': [], 'usage': {}})}\n\n"
    yield "data: [DONE]\n\n"


@given(answers=ANSWERS)
async def test_each_answer_of_a_stream_has_its_index(answers: list[list[str]]) -> None:
    before = [event async for event in streamed(answers)]
    after = [event async for event in numbered(streamed(answers))]
    assert after[-2:] == before[-2:]
    told: list[list[str]] = [[] for _ in answers]
    for event in after[:-2]:
        [choice] = json.loads(event.removeprefix("data: "))["choices"]
        told[choice["index"]].append(choice["text"])
    assert told == [[*texts, ""] for texts in answers]


async def test_an_error_within_a_stream_stays_as_it_is() -> None:
    async def failed() -> AsyncIterator[str]:
        yield 'data: {"error": {"message": "no"}}\n\n'
        yield "data: [DONE]\n\n"

    assert [event async for event in numbered(failed())] == [event async for event in failed()]


@pytest.mark.parametrize("problem", ["The n 0 must be a positive int."])
def test_what_lmdeploy_refuses_itself_stays_refused(problem: str) -> None:
    asked = Asked(["a"] * 500, 2)
    assert check_request(lambda _request, _context: problem)(asked, None) == problem
