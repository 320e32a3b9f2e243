"""Prompts have the tokens that LMDeploy gives them, made in another thread and without encoding earlier turns again.
LMDeploy's real processor, templates and tokenizers of every kind.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.lmdeploy.hooks import prompt_hooks
from engines.lmdeploy.http.prompts import Prompts
from engines.lmdeploy.patching import install
from engines.requests.salt import SALT
from tests.support.examples import examples
from tests.support.tokenizer_kinds import KINDS

_TEXTS = st.text(st.sampled_from("the fox is a dog.  \n\té你😀<|im_start|></s>[SEP]"), max_size=60)
_MORE = "It's a long message, isn't it? def f(x: int) -> str: return 人工智能 😀. " * 40
Messages = list[dict[str, str]]


@pytest.fixture(scope="module", params=list(KINDS))
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """LMDeploy's own processor."""
    return _processor(KINDS[request.param](tmp_path_factory.mktemp("tokenizers") / request.param))


@pytest.fixture(scope="module")
def hooked(stock: Any) -> Iterator[Any]:
    """The same with the hooks in; ``stock`` has none of them, as it was made before and is asked through them not."""
    undo = install(prompt_hooks())
    processor = type(stock)(stock.tokenizer, stock.chat_template)
    undo()
    yield processor
    processor.kvgate_prompts.close()


@settings(max_examples=examples(200))
@given(
    texts=st.lists(_TEXTS, min_size=1, max_size=6),
    salt=st.sampled_from(["", "a", "b"]),
    starts_with=st.sampled_from([1, 2]),
)
def test_every_turn_of_a_chat_has_lmdeploys_text_and_tokens(
    stock: Any, hooked: Any, texts: list[str], salt: str, starts_with: int
) -> None:
    roles = ["user", "assistant"]
    chat = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    for end in range(starts_with, len(chat) + 1, 2):
        for prompt in (chat[:end], texts[end - 1]):
            assert _made(_ours, hooked, prompt, salt) == _made(_theirs, stock, prompt)


def test_a_prompt_is_rendered_and_tokenized_beside_the_loop(hooked: Any) -> None:
    from lmdeploy.model import BaseChatTemplate

    seen: list[threading.Thread] = []

    class Watching(BaseChatTemplate):
        def messages2prompt(self, messages: Any, **kwargs: Any) -> str:
            seen.append(threading.current_thread())
            text: str = super().messages2prompt(messages, **kwargs)
            return text

    own, hooked.chat_template = hooked.chat_template, Watching()
    try:
        _made(_ours, hooked, [{"role": "user", "content": "the fox"}])
    finally:
        hooked.chat_template = own
    assert [thread.name.startswith("kvgate-prompts") for thread in seen] == [True]


def test_only_new_messages_are_encoded_and_no_tenant_finds_anothers(tmp_path: Path) -> None:
    processor = _processor(KINDS["byte-level"](tmp_path / "byte-level"))
    prompts = Prompts(processor.tokenizer, memory_bytes=1 << 20)
    chat = [{"role": "user", "content": f"{turn}: {_MORE}"} for turn in range(6)]
    try:
        _made(_through(prompts), processor, chat[:5], "acme")
        before = prompts.memory.stats()
        _made(_through(prompts), processor, chat, "acme")
        turn = prompts.memory.stats()
        _made(_through(prompts), processor, chat[:5], "other")
        stranger = prompts.memory.stats()
    finally:
        prompts.close()

    assert turn.missed_chars - before.missed_chars < len(chat[-1]["content"]) + 100
    assert turn.hit_chars - before.hit_chars > sum(len(each["content"]) for each in chat[:5])
    assert stranger.hits - turn.hits < 10, "only markers such as a role and a line's end repeat within its own chat"
    assert stranger.missed_chars - turn.missed_chars > sum(len(each["content"]) for each in chat[:5])


def test_without_memory_nothing_is_remembered_and_the_tokens_are_the_same(tmp_path: Path) -> None:
    processor = _processor(KINDS["byte-level"](tmp_path / "byte-level"))
    prompts = Prompts(processor.tokenizer, memory_bytes=0)
    chat = [{"role": "user", "content": _MORE}]
    try:
        for _ in range(2):
            assert _made(_through(prompts), processor, chat) == _made(_theirs, processor, chat)
        assert prompts.memory.stats().pieces == 0
    finally:
        prompts.close()


class Letters:
    """A part of a tokenizer that is written in Python, which can't be copied."""

    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda _, each: [each[place : place + 1] for place in range(len(str(each)))])


def test_a_tokenizer_that_cannot_be_copied_encodes_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import pre_tokenizers

    processor = _processor(KINDS["byte-level"](tmp_path / "byte-level"))
    processor.tokenizer.model.model.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Letters())
    monkeypatch.setattr(logging.getLogger("lmdeploy"), "propagate", True)
    prompts = Prompts(processor.tokenizer, memory_bytes=1 << 20)
    try:
        chat = [{"role": "user", "content": "the fox"}]
        assert _made(_through(prompts), processor, chat) == _made(_theirs, processor, chat)
    finally:
        prompts.close()
    assert "can't be copied" in caplog.text


def test_what_a_template_refuses_is_refused_as_before(stock: Any, hooked: Any) -> None:
    for make, processor in ((_theirs, stock), (_ours, hooked)):
        with pytest.raises(AssertionError, match="role"):
            _made(make, processor, [{"content": "no role"}])


def test_half_a_surrogate_pair_is_a_clients_error_as_before(stock: Any, hooked: Any) -> None:
    for make, processor in ((_theirs, stock), (_ours, hooked)):
        with pytest.raises((TypeError, ValueError)):  # both are 400
            _made(make, processor, [{"role": "user", "content": "half a pair: \ud800"}])


def test_many_prompts_at_once_have_their_own_tokens(stock: Any, hooked: Any) -> None:
    chats = [[{"role": "user", "content": f"{number} {_MORE * (number % 3)}"}] for number in range(24)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(_ours(hooked, chat) for chat in chats))

    assert asyncio.run(all_at_once()) == [_made(_theirs, stock, chat) for chat in chats]


_Make = Callable[[Any, Any], Coroutine[Any, Any, Any]]


def _made(make: _Make, processor: Any, prompt: Messages | str, salt: str = "") -> Any:
    async def made() -> Any:
        with SALT.handling(salt):
            return await make(processor, prompt)

    return asyncio.run(made())


async def _theirs(processor: Any, prompt: Messages | str) -> Any:
    return await type(processor)._get_text_prompt_input(processor, prompt, do_preprocess=True, adapter_name=None)


async def _ours(processor: Any, prompt: Messages | str) -> Any:
    (hook,) = (hook for hook in prompt_hooks() if hook.target.endswith("._get_text_prompt_input"))
    replaced = hook.replace(type(processor)._get_text_prompt_input)
    return await replaced(processor, prompt, do_preprocess=True, adapter_name=None)


def _through(prompts: Prompts) -> _Make:
    async def make(processor: Any, prompt: Any) -> Any:
        return await prompts.make(processor, lambda like: _theirs(like, prompt), salt=SALT.current)

    return make


def _processor(folder: Path) -> Any:
    from lmdeploy.model import get_chat_template
    from lmdeploy.serve.processors.multimodal import MultimodalProcessor
    from lmdeploy.tokenizer import Tokenizer

    return MultimodalProcessor(Tokenizer(str(folder)), get_chat_template(str(folder), None))
