"""Texts have exactly the tokens they are asked for, and share exactly what their blocks share."""

from collections.abc import Callable, Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.models.tiny import write_tokenizer
from gateway.fingerprint.tokenizer import ModelTokenizer, load_tokenizer
from kvcontrol.traces import OPENER, Ask, BlockTexts, SynthesisError, TextMaker, TokenCount, Words, learn_words
from kvcontrol.traces.synthesis import MIN_WORDS

BLOCK = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("models") / "tiny-llama"))


def learned(tell: Callable[[Ask], TokenCount]) -> Words:
    learning = learn_words()
    try:
        ask = next(learning)
        while True:
            ask = learning.send(tell(ask))
    except StopIteration as done:
        return done.value


def telling(tokenizer: ModelTokenizer) -> Callable[[Ask], TokenCount]:
    def tell(ask: Ask) -> TokenCount:
        ids = message(tokenizer, ask.text) if ask.as_message else tokenizer.token_ids(ask.text, special=False)
        return TokenCount(count=len(ids), spelled=tokenizer.token_texts(ids), context_tokens=8192)

    return tell


def message(tokenizer: ModelTokenizer, content: str) -> list[int]:
    return tokenizer.token_ids(tokenizer.render([{"role": "user", "content": content}], {}), special=True)


@pytest.fixture(scope="module")
def words(tokenizer: ModelTokenizer) -> Words:
    return learned(telling(tokenizer))


def test_what_a_message_costs_beside_its_words_is_learned(tokenizer: ModelTokenizer, words: Words) -> None:
    text = TextMaker(words.words).text(5, 333)
    assert len(message(tokenizer, OPENER + text)) == words.message_tokens + 333
    assert words.context_tokens == 8192


prompts = st.tuples(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 70))


@given(first=prompts, second=prompts)
def test_prompts_share_the_tokens_of_the_blocks_that_they_share(
    tokenizer: ModelTokenizer, words: Words, first: tuple[list[int], int], second: tuple[list[int], int]
) -> None:
    texts = BlockTexts(TextMaker(words.words), {block: block for block in range(31)}, block_tokens=BLOCK)
    one, other = (
        tokenizer.token_ids(texts.content(ids, tokens, tail=tail), special=False)
        for tail, (ids, tokens) in enumerate((first, second))
    )
    assert (len(one), len(other)) == (first[1], second[1])
    shared = common(first[0], second[0]) * BLOCK
    found = common(one, other)
    most = min(shared, first[1], second[1])
    assert most <= found <= most + texts.digits


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_no_two_blocks_have_the_same_text_and_every_block_always_has_its_own(words: Words) -> None:
    maker = TextMaker(words.words)
    count = 20_000
    digits = maker.digits(count)
    assert len(words.words) ** (digits - 1) < count <= len(words.words) ** digits
    texts = {maker.text(number, digits, digits=digits) for number in range(count)}
    assert len(texts) == count
    assert TextMaker(words.words).text(7, 100, digits=3) == maker.text(7, 100, digits=3)
    assert TextMaker(words.words, seed=1).text(7, 100, digits=3) != maker.text(7, 100, digits=3)


def test_long_texts_are_as_long_as_they_should_be(tokenizer: ModelTokenizer, words: Words) -> None:
    text = TextMaker(words.words).text(16_000, 40_000, digits=3)
    assert len(tokenizer.token_ids(text, special=False)) == 40_000


def test_a_block_too_short_to_tell_all_of_them_apart_is_refused(words: Words) -> None:
    with pytest.raises(SynthesisError, match="1 tokens a block can't tell 1000 blocks apart: 2 are needed"):
        BlockTexts(TextMaker(words.words), {block: block for block in range(1000)}, block_tokens=1)


def spelling(ask: Ask) -> TokenCount:
    pieces = [f"Ġ{word}" for word in ask.text.split()]
    return TokenCount(count=len(pieces), spelled=pieces)


@pytest.mark.parametrize(
    ("tell", "why"),
    [
        (lambda _: TokenCount(count=3), f"0 words of one token among .* {MIN_WORDS} are needed"),
        (
            lambda ask: TokenCount(count=len(ask.text.split()) // 2, spelled=spelling(ask).spelled),
            "makes 3 tokens of 7 words .* it merges words",
        ),
        (
            lambda ask: TokenCount(
                count=len(ask.text) if ask.as_message else spelling(ask).count, spelled=spelling(ask).spelled
            ),
            "a message's own tokens depend on its length",
        ),
    ],
)
def test_a_tokenizer_that_sums_dont_hold_for_is_refused(tell: Callable[[Ask], TokenCount], why: str) -> None:
    with pytest.raises(SynthesisError, match=why):
        learned(tell)


def test_a_real_tokenizer_with_other_spaces_is_learned_too() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    built.decoder = decoders.Metaspace()
    text = " ".join(TextMaker([f"w{number}" for number in range(99)]).text(1, 200).split())
    sample = "the of and to in is that it was for on are as with his they at be this from have or by one " * 3
    built.train_from_iterator([f" {sample}{text}"], trainers.BpeTrainer(vocab_size=600))

    def tell(ask: Ask) -> TokenCount:
        encoded = built.encode(ask.text, add_special_tokens=False)
        return TokenCount(count=len(encoded.ids), spelled=encoded.tokens)

    words = learned(tell)
    content = TextMaker(words.words).text(3, 50)
    assert len(built.encode(content, add_special_tokens=False).ids) == 50
