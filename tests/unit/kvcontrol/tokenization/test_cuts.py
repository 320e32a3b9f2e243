"""A long text that is cut has the ids of the whole; a tokenizer for which that can't be known is not cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvcontrol.tokenization import Cuts, HuggingFaceEncoder, PieceMemory, RememberingEncoder, remembering
from tests.support.examples import examples

SPECIAL = ["<|start|>", "<|end|>"]
CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "人工智能正在改变世界。\n北京的秋天很美。\n",
    "One line of words\nand another One!\n\nÉtat, c'est moi\n",
] * 3
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(before: Any, *, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gpt_2() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama_3() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    return trained(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))


def composing() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.NFC())


def of_whole_sentences() -> Tokenizer:
    """Its merges go across spaces and line breaks."""
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


KINDS: dict[str, Callable[[], Tokenizer]] = {"GPT-2": gpt_2, "Llama 3": llama_3, "NFC": composing}


def remembered(tokenizer: Tokenizer) -> RememberingEncoder:
    made = remembering(HuggingFaceEncoder(tokenizer), tokenizer, PieceMemory(1 << 20))
    assert isinstance(made, RememberingEncoder)
    return made


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [
                " ",
                "  ",
                "\n",
                "\r\n",
                "\n\n",
                "\t",
                "a",
                "Zz",
                " a",
                "x y",
                "don't",
                "!",
                "?\n",
                "1",
                "。",
                "中文",
                "É",
                "\u0301",
            ]
        ),
        st.text(max_size=6),
        st.sampled_from(CORPUS).flatmap(lambda text: st.integers(0, 200).map(lambda at: text[at : at + 40])),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_cut_wherever_it_can_be_has_the_ids_of_the_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    reference, cuts = HuggingFaceEncoder(tokenizer), remembered(tokenizer).cuts
    assert cuts is not None
    special = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    encoder = RememberingEncoder(reference, special, PieceMemory(1 << 20), cuts=cuts, part_chars=1)

    @settings(max_examples=examples(800))
    @given(texts)
    def holds(text: str) -> None:
        assert encoder.encode(text) == reference.encode(text)

    holds()


@given(text=texts, least=st.integers(1, 40))
def test_the_parts_are_the_text_and_none_but_the_last_is_short(text: str, least: int) -> None:
    parts = [*Cuts([]).parts(text, least)]
    assert "".join(parts) == text
    assert all(len(part) >= least for part in parts[:-1])


def test_a_long_text_of_words_is_encoded_in_parts_of_about_the_same_length() -> None:
    encoder = remembered(gpt_2())
    for text in ("some words " * 100_000, "中文的一行\n" * 100_000):
        assert encoder.look_up(text, salt="s").longest_chars < 70_000
        assert encoder.encode(text, salt="s") == HuggingFaceEncoder(gpt_2()).encode(text)


def test_a_run_without_words_and_lines_stays_whole() -> None:
    assert remembered(gpt_2()).look_up("x" * 300_000, salt="s").longest_chars == 300_000


def test_a_tokenizer_whose_tokens_reach_across_words_is_not_cut_there() -> None:
    tokenizer = of_whole_sentences()
    reference, encoder = HuggingFaceEncoder(tokenizer), remembered(tokenizer)
    text = "One line of words and another " * 5_000
    assert encoder.encode(text) == reference.encode(text)
    assert encoder.look_up(text + "!", salt="s").longest_chars > 140_000


@pytest.mark.parametrize("token", ["aĠ", "a▁b", "wordsĠof", "a b"])
def test_a_vocabulary_with_a_token_across_a_space_has_no_cuts_before_spaces(token: str) -> None:
    assert [*Cuts([token]).parts("some words\nand more", 1)] == ["some words\n", "and more"]


@pytest.mark.parametrize("token", ["Ċa", "x\ny", "ĊĊä"])
def test_a_vocabulary_with_a_token_across_a_line_break_has_none_behind_those(token: str) -> None:
    assert [*Cuts([token]).parts("words\nand more", 1)] == ["words\nand", " more"]
