"""What LMDeploy is given of a body of ``/v1/completions``."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.lmdeploy.http.completions import MOST_ANSWERS, check_request


@dataclass
class Asked:
    prompt: Any
    n: int = 1
    stream: bool = False


def checked(prompt: Any, n: int = 1, *, stream: bool = False) -> tuple[str, Any]:
    asked = Asked(prompt, n, stream)
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


def test_several_answers_are_not_streamed() -> None:
    problem, _ = checked("a", 2, stream=True)
    assert "leave out stream" in problem
    assert checked(["a", "b"], stream=True) == ("", ["a", "b"])


@pytest.mark.parametrize("problem", ["The n 0 must be a positive int."])
def test_what_lmdeploy_refuses_itself_stays_refused(problem: str) -> None:
    asked = Asked(["a"] * 500, 2)
    assert check_request(lambda _request, _context: problem)(asked, None) == problem
