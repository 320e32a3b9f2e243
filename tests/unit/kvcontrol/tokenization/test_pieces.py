"""Encoding by remembered pieces gives exactly the ids of encoding the whole, or is not done."""

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvcontrol.tokenization import (
    HuggingFaceEncoder,
    Memoryless,
    PieceMemory,
    RememberingEncoder,
    choose_encoder,
    disagreement,
    remembering,
)
from tests.support.examples import examples

SPECIAL = ["<|start|>", "<|end|>", "<|end|>x"]
CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "人工智能正在改变世界。北京的秋天很美。",
    "👩‍👩‍👧 🏳️‍🌈 e\u0301",
] * 3


def byte_level(*, bos: bool = False, prefix_space: bool = False, special: list[Any] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL if special is None else special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 0), ("<|end|>", 1)]
        )
    return tokenizer


def sentence_piece_like() -> Tokenizer:
    """Spaces become ▁, and one is put before the *first* piece only: a piece's ids depend on where it stands."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


PLAIN = byte_level()
BARE = byte_level(special=[]).to_str()
FRAMED = byte_level(bos=True)


def remember(tokenizer: Tokenizer, memory: PieceMemory | None = None) -> RememberingEncoder:
    encoder = remembering(HuggingFaceEncoder(tokenizer), tokenizer, memory or PieceMemory(1 << 20))
    assert isinstance(encoder, RememberingEncoder)
    return encoder


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [*SPECIAL, "<|st", "|>", "\n", " ", "", "x", "user\n", "def f(x):\n\treturn 1\n", "你好，世界"]
        ),
        st.text(max_size=12),
        st.sampled_from(CORPUS).flatmap(lambda text: st.integers(0, 200).map(lambda at: text[at : at + 40])),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("tokenizer", [PLAIN, FRAMED], ids=["plain", "with tokens around"])
def test_the_ids_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    reference = HuggingFaceEncoder(tokenizer)
    encoder = remember(tokenizer)

    @settings(max_examples=examples(400), deadline=None)
    @given(texts)
    def holds(text: str) -> None:
        assert encoder.encode(text) == reference.encode(text)

    holds()


def test_a_new_turn_encodes_its_new_text_only() -> None:
    memory = PieceMemory(1 << 20)
    encoder = remember(PLAIN, memory)
    turn = "".join(f"<|start|>user\nquestion {n} {'word ' * 50}<|end|>\n" for n in range(6))
    encoder.encode(turn)
    before = memory.stats()
    encoder.encode(turn + "<|start|>user\nand now?<|end|>\n")
    after = memory.stats()
    assert after.missed_chars - before.missed_chars == len("user\nand now?")
    assert after.hit_chars - before.hit_chars == len(turn) - 6 * len("<|start|><|end|>") + 1


def test_the_memory_is_bounded_and_forgets_what_was_not_used() -> None:
    memory = PieceMemory(40_000)
    encoder = remember(PLAIN, memory)
    for n in range(300):
        encoder.encode(f"<|start|>{n} {'word ' * 30}<|end|>keep me")
    stats = memory.stats()
    assert stats.held_bytes <= 40_000
    assert 10 < stats.pieces < 300
    encoder.encode("keep me")
    assert memory.stats().hits == stats.hits + 1


def test_a_piece_that_would_push_out_everything_is_not_remembered() -> None:
    memory = PieceMemory(10_000)
    encoder = remember(PLAIN, memory)
    encoder.encode("small<|end|>" + "large " * 2_000)
    encoder.encode("small")
    assert (memory.stats().hits, memory.stats().pieces) == (1, 1)


class Spy(HuggingFaceEncoder):
    """The real tokenizer, which remembers what it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.asked: list[str] = []

    def encode(self, text: str) -> bytes:
        self.asked.append(text)
        return super().encode(text)


def asked(spy: Spy, encoder: RememberingEncoder, text: str, salt: str) -> list[str]:
    """Return what of a tenant's text the tokenizer had to encode."""
    spy.asked.clear()
    assert encoder.encode(text, salt=salt) == HuggingFaceEncoder(PLAIN).encode(text)
    return list(spy.asked)


def test_what_one_tenant_sent_makes_nothing_faster_for_another() -> None:
    spy = Spy(PLAIN)
    encoder = remembering(spy, PLAIN, PieceMemory(1 << 20))
    assert isinstance(encoder, RememberingEncoder)
    text = "<|start|>user\nthe secret plan<|end|>\n<|start|>"
    everything = ["user\nthe secret plan", "\n"]
    assert asked(spy, encoder, text, "acme") == everything
    assert asked(spy, encoder, text, "acme") == []
    for other in ("umbrella", "", "acm", "acme ", "acmeu"):
        assert asked(spy, encoder, text, other) == everything
        assert asked(spy, encoder, text, other) == []
    assert asked(spy, encoder, text, "acme") == []


def test_a_salt_and_a_text_are_not_taken_for_another_salt_and_text() -> None:
    spy = Spy(PLAIN)
    encoder = remembering(spy, PLAIN, PieceMemory(1 << 20))
    assert isinstance(encoder, RememberingEncoder)
    assert asked(spy, encoder, "bc", "a") == ["bc"]
    assert asked(spy, encoder, "c", "ab") == ["c"]
    assert asked(spy, encoder, "abc", "") == ["abc"]


def test_tenants_share_one_bound_in_bytes() -> None:
    memory = PieceMemory(40_000)
    encoder = remember(PLAIN, memory)
    for n in range(300):
        encoder.encode(f"{n} {'word ' * 30}", salt=f"tenant {n % 7}")
    assert memory.stats().held_bytes <= 40_000


@pytest.mark.parametrize("letter", ["x", "é", "中", "🙂"], ids=["1 byte", "2 bytes", "3 bytes", "4 bytes"])
def test_the_memory_counts_the_bytes_that_it_takes_in_any_script(letter: str) -> None:
    memory = PieceMemory(1 << 20)
    owner = memory.of("tenant")
    tracemalloc.start()
    try:
        for n in range(4_000):
            owner.put(owner.find(f"{n}{letter * 400}")[0], bytes(bytearray(64)))
        really = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert memory.stats().pieces > 2_000
    assert 0.6 * memory.stats().held_bytes < really < 1.2 * memory.stats().held_bytes


def test_no_text_is_kept_in_the_memory() -> None:
    memory = PieceMemory(1 << 20)
    remember(PLAIN, memory).encode("<|start|>the secret plan<|end|>", salt="tenant")
    kept = [each for item in memory._pieces.items() for each in item]
    assert kept
    assert not any(b"secret" in each for each in kept)
    assert all(isinstance(each, bytes) for each in kept)


def test_threads_at_once_get_the_same_ids() -> None:
    memory = PieceMemory(20_000)
    encoder, reference = remember(PLAIN, memory), HuggingFaceEncoder(PLAIN)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for n in range(150):
            text = f"<|start|>shared {n % 7}<|end|>own {seed} {n}<|end|>"
            if encoder.encode(text) != reference.encode(text):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert memory.stats().held_bytes <= 20_000


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (sentence_piece_like(), "depend on its neighbours"),
        (byte_level(special=[]), "no special tokens"),
        (byte_level(special=[AddedToken("<|start|>", lstrip=True, special=True)]), "depends on what stands around it"),
        (byte_level(special=[AddedToken("<|start|>", single_word=True)]), "depends on what stands around it"),
    ],
    ids=["first piece is special", "nothing to cut at", "swallows spaces", "whole words only"],
)
def test_a_tokenizer_whose_pieces_are_not_independent_gets_no_memory(tokenizer: Tokenizer, reason: str) -> None:
    refused = remembering(HuggingFaceEncoder(tokenizer), tokenizer, PieceMemory(1 << 20))
    assert isinstance(refused, Memoryless)
    assert reason in refused.reason


@pytest.mark.parametrize(
    "tokens",
    [
        [("<|e|>", False), ("|><", False), ("e|>", True)],
        [("<b>x", False), ("a<b>", True)],
        [("<b>", False), ("<a<b>c>", True)],
        [("<b>", True), ("<a<b>c>", False)],
        [("<b>", False), ("<b>c>", True)],
        [("b>", False), ("<a<b>", True)],
        [*[(f"<|reserved_{n}|>", False) for n in range(400)], ("<b>", False), ("<a<b>c>", True)],
    ],
    ids=["three", "two", "in the middle", "in the middle, the other way", "at the start", "at the end", "of hundreds"],
)
def test_special_tokens_that_overlap_are_encoded_as_the_tokenizer_does(tokens: list[tuple[str, bool]]) -> None:
    tokenizer = byte_level(special=[])
    tokenizer.add_tokens([AddedToken(text, normalized=normalized) for text, normalized in tokens])
    reference = HuggingFaceEncoder(tokenizer)
    chosen = choose_encoder(tokenizer).encoder
    encoder = remembering(chosen, tokenizer, PieceMemory(1 << 20))
    for text in ("e|><", "a<b>x", "<|e|><", "xa<b>xa<b>", "<a<b>c>", "x<a<b>c>y<b>", "<b>c>", "<a<b>"):
        assert chosen.encode(text) == reference.encode(text)
        if isinstance(encoder, RememberingEncoder):
            assert encoder.encode(text) == reference.encode(text)


letters = st.text("<ab>", min_size=1, max_size=5)


@settings(max_examples=examples(60), deadline=None, print_blob=True)
@given(
    tokens=st.dictionaries(letters, st.booleans(), min_size=1, max_size=5),
    asked_for=st.lists(st.text("<ab>", max_size=14), max_size=20),
)
def test_any_added_tokens_are_encoded_as_the_tokenizer_does_or_without_a_memory(
    tokens: dict[str, bool], asked_for: list[str]
) -> None:
    tokenizer = Tokenizer.from_str(BARE)
    tokenizer.add_tokens([AddedToken(text, normalized=normalized) for text, normalized in tokens.items()])
    reference = HuggingFaceEncoder(tokenizer)
    encoder = remembering(reference, tokenizer, PieceMemory(1 << 20))
    for text in [*asked_for, *[first + second for first in tokens for second in tokens]]:
        if isinstance(encoder, RememberingEncoder):
            assert encoder.encode(text) == reference.encode(text)


def test_added_tokens_that_overlap_in_too_many_ways_get_no_memory() -> None:
    tokenizer = byte_level(special=[])
    tokenizer.add_tokens([AddedToken("x" * length) for length in range(2, 60)])
    refused = remembering(HuggingFaceEncoder(tokenizer), tokenizer, PieceMemory(1 << 20))
    assert isinstance(refused, Memoryless)
    assert "overlap in more than 20000 ways" in refused.reason


def test_special_tokens_that_match_normalised_text_get_no_memory() -> None:
    tokenizer = byte_level(special=[])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<|word|>", normalized=True)])
    refused = remembering(HuggingFaceEncoder(tokenizer), tokenizer, PieceMemory(1 << 20))
    assert isinstance(refused, Memoryless)


def test_a_prefix_space_is_either_remembered_exactly_or_not_at_all() -> None:
    tokenizer = byte_level(prefix_space=True)
    encoder = remembering(HuggingFaceEncoder(tokenizer), tokenizer, PieceMemory(1 << 20))
    if isinstance(encoder, RememberingEncoder):
        assert disagreement(encoder, HuggingFaceEncoder(tokenizer)) is None


def test_the_chosen_encoder_agrees_with_the_tokenizer_and_says_why_it_was_chosen() -> None:
    choice = choose_encoder(PLAIN)
    assert choice.reason
    assert disagreement(choice.encoder, HuggingFaceEncoder(PLAIN)) is None


def test_a_disagreement_is_found_and_named() -> None:
    class Wrong(HuggingFaceEncoder):
        def encode(self, text: str) -> bytes:
            return super().encode(text.replace("红", "黑"))

    assert "红" in (disagreement(Wrong(PLAIN), HuggingFaceEncoder(PLAIN)) or "")
