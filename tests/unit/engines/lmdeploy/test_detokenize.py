"""The text of an answer is the same in whatever portions its tokens arrive. LMDeploy's real tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.lmdeploy.hooks import server_hooks
from engines.lmdeploy.patching import install

_TARGET = "lmdeploy.tokenizer:HuggingFaceTokenizer.detokenize_incrementally"
_PROMPT = [5, 6, 7, 8, 9]
Portions = Callable[[Sequence[int], Sequence[int]], list[str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from lmdeploy.tokenizer import Tokenizer

    from engines.models.tiny import build_tiny

    return Tokenizer(str(build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")))


@pytest.fixture(scope="module")
def portions(tokenizer: Any) -> Iterator[Portions]:
    """Texts, one for each portion of an answer's tokens, as ``AsyncEngine.generate`` makes them; the hook is in."""
    from lmdeploy.tokenizer import DetokenizeState

    def texts(answer: Sequence[int], ends: Sequence[int]) -> list[str]:
        state, ids, pieces = DetokenizeState(len(_PROMPT)), list(_PROMPT), []
        for start, end in pairwise((0, *ends, len(answer))):
            ids += answer[start:end]
            piece, state = tokenizer.detokenize_incrementally(ids, state)
            pieces.append(piece)
        return pieces

    undo = install([hook for hook in server_hooks() if hook.target == _TARGET])
    yield texts
    undo()


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.model.model.encode(text, add_special_tokens=False))


def test_a_last_token_that_leaves_a_character_unfinished_holds_back_none_before_it(
    tokenizer: Any, portions: Portions
) -> None:
    answer = [*_ids(tokenizer, " str option return value"), _ids(tokenizer, "é")[0]]

    assert portions(answer, []) == [" str option return value"]
    assert portions(answer, [1]) == [" str", " option return value"]
    last = len(answer) - 2
    assert "".join(portions(answer, [last])) == " str option return value"


def test_a_character_is_whole_once_its_last_token_is_there(tokenizer: Any, portions: Portions) -> None:
    answer = _ids(tokenizer, "ab 😀 cd")
    begun = len(_ids(tokenizer, "ab ")) + 2  # of the four bytes

    assert portions(answer, [begun]) == ["ab ", "😀 cd"]
    assert portions(answer, [begun, begun + 1]) == ["ab ", "", "😀 cd"]


@given(data=st.data())
def test_the_portions_make_no_difference(data: st.DataObject, portions: Portions) -> None:
    answer = data.draw(st.lists(st.integers(0, 1023), min_size=1, max_size=24))
    ends = sorted(data.draw(st.sets(st.integers(1, len(answer)), max_size=6)) - {len(answer)})

    assert "".join(portions(answer, ends)) == "".join(portions(answer, range(1, len(answer))))
