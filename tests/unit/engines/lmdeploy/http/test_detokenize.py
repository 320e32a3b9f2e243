"""The text of an answer is the same in whatever portions its tokens arrive, and after a prompt of whatever length.
LMDeploy's real tokenizer class over tokenizers of every kind.
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.lmdeploy.hooks import server_hooks
from engines.lmdeploy.http import detokenize
from tests.support.examples import examples
from tests.support.tokenizer_kinds import KINDS

_TARGET = "lmdeploy.tokenizer:HuggingFaceTokenizer.detokenize_incrementally"
_PROMPT = [5, 6, 7, 8, 9]
_Detokenize = Callable[..., tuple[str, Any]]


class WatchedIds(list[int]):
    """Token ids that count how many of them have been read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _tokenizer(kind, tmp_path_factory.mktemp("tokenizers") / kind)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _tokenizer("byte-level", tmp_path_factory.mktemp("tokenizers") / "byte-level")


@pytest.fixture(scope="module")
def stock() -> _Detokenize:
    """LMDeploy's own function."""
    from lmdeploy.tokenizer import HuggingFaceTokenizer

    replaced: _Detokenize = HuggingFaceTokenizer.detokenize_incrementally
    return replaced


@pytest.fixture(scope="module")
def ours(stock: _Detokenize) -> _Detokenize:
    """What the table puts in its place."""
    (hook,) = (hook for hook in server_hooks() if hook.target == _TARGET)
    assert hook.replace is detokenize.detokenize_incrementally
    replacement: _Detokenize = hook.replace(stock)
    return replacement


def test_a_last_token_that_leaves_a_character_unfinished_holds_back_none_before_it(
    byte_level: Any, ours: _Detokenize
) -> None:
    answer = [*_ids(byte_level, " str option return value"), _ids(byte_level, "é")[0]]

    assert _texts(ours, byte_level, answer, []) == [" str option return value"]
    assert _texts(ours, byte_level, answer, [1]) == [" str", " option return value"]
    last = len(answer) - 2
    assert "".join(_texts(ours, byte_level, answer, [last])) == " str option return value"


def test_a_character_is_whole_once_its_last_token_is_there(byte_level: Any, ours: _Detokenize) -> None:
    answer = _ids(byte_level, "ab 😀 cd")
    begun = len(_ids(byte_level, "ab ")) + 2  # of the four bytes

    assert _texts(ours, byte_level, answer, [begun]) == ["ab ", "😀 cd"]
    assert _texts(ours, byte_level, answer, [begun, begun + 1]) == ["ab ", "", "😀 cd"]


@settings(max_examples=examples(300))
@given(data=st.data())
def test_each_token_alone_has_the_text_that_lmdeploy_gives_it_after_the_whole_prompt(
    data: st.DataObject, tokenizer: Any, stock: _Detokenize, ours: _Detokenize
) -> None:
    prompt, answer, options = _draw(data, tokenizer)
    each = range(1, len(answer))

    assert _texts(ours, tokenizer, answer, each, prompt, **options) == _texts(
        stock, tokenizer, answer, each, prompt, **options
    )


@settings(max_examples=examples(300))
@given(data=st.data())
def test_the_portions_make_no_difference(
    data: st.DataObject, tokenizer: Any, stock: _Detokenize, ours: _Detokenize
) -> None:
    prompt, answer, options = _draw(data, tokenizer)
    ends = sorted(data.draw(st.sets(st.integers(1, len(answer)), max_size=6)) - {len(answer)})

    assert "".join(_texts(ours, tokenizer, answer, ends, prompt, **options)) == "".join(
        _texts(stock, tokenizer, answer, range(1, len(answer)), prompt, **options)
    )


def test_a_portion_of_thousands_of_tokens_has_the_text_of_each_alone(byte_level: Any, ours: _Detokenize) -> None:
    answer = _ids(byte_level, "ab é cd 😀 the option 你好 return value. " * 60)

    whole = _texts(ours, byte_level, answer, [])

    assert whole == ["".join(_texts(ours, byte_level, answer, range(1, len(answer))))]


def test_the_text_of_a_long_prompt_is_never_looked_at_but_for_its_end(tokenizer: Any, ours: _Detokenize) -> None:
    from lmdeploy.tokenizer import DetokenizeState

    prompt = _ids(tokenizer, "the quick brown fox isn't a lazy dog, or is it? " * 2000)
    ids, state, kept = WatchedIds(prompt), DetokenizeState(len(prompt)), []

    for token_id in _ids(tokenizer, "a quick value of the fox " * 20):
        ids.append(token_id)
        _, state = ours(tokenizer.model, ids, state)
        kept.append(len(state.prev_tokens))

    assert ids.read <= len(ids) - len(prompt) + 64
    assert max(kept) <= 64


@pytest.mark.parametrize("faces", [1, 30])
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_prompt_may_end_within_a_character_or_a_long_run_of_them(
    tokenizer: Any, stock: _Detokenize, ours: _Detokenize, faces: int, missing: int
) -> None:
    prompt = _ids(tokenizer, "the fox " * 50 + "\N{GRINNING FACE}" * faces)[:-missing]
    answer = [*_ids(tokenizer, "\N{GRINNING FACE}")[-missing:], *_ids(tokenizer, "the fox")]
    each = range(1, len(answer))

    assert _texts(ours, tokenizer, answer, each, prompt) == _texts(stock, tokenizer, answer, each, prompt)


def _tokenizer(kind: str, folder: Path) -> Any:
    from lmdeploy.tokenizer import Tokenizer

    return Tokenizer(str(KINDS[kind](folder)))


def _draw(data: st.DataObject, tokenizer: Any) -> tuple[list[int], list[int], dict[str, bool]]:
    """A prompt and an answer, of what a model may say and of what none should; an id may be in no vocabulary."""
    ids = st.integers(0, len(tokenizer.get_vocab()))
    text = st.text(st.sampled_from("the fox is a dog.  \n\té你😀"), max_size=12).map(lambda text: _ids(tokenizer, text))
    parts = st.lists(st.one_of(text, st.lists(ids, max_size=6), ids.map(lambda each: [each] * 9)), max_size=6)
    prompt, answer = (list(chain.from_iterable(data.draw(parts))) for _ in range(2))
    options = {name: data.draw(st.booleans()) for name in ("skip_special_tokens", "spaces_between_special_tokens")}
    return prompt, answer or [data.draw(ids)], options


def _texts(
    detokenize: _Detokenize,
    tokenizer: Any,
    answer: Sequence[int],
    ends: Sequence[int],
    prompt: Sequence[int] = _PROMPT,
    **options: bool,
) -> list[str]:
    """The texts, one for each portion of an answer's tokens, as ``AsyncEngine.generate`` makes them."""
    from lmdeploy.tokenizer import DetokenizeState

    state, ids, texts = DetokenizeState(len(prompt)), list(prompt), []
    for start, end in pairwise((0, *ends, len(answer))):
        ids += answer[start:end]
        text, state = detokenize(tokenizer.model, ids, state, **options)
        texts.append(text)
    return texts


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.model.model.encode(text, add_special_tokens=False))
