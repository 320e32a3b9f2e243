import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from engines.models.tiny import build_tiny
from gateway.admission.fair_threads import FairThreads
from gateway.errors import SettingsError
from gateway.fingerprint import (
    ChatPrompt,
    Fingerprint,
    Fingerprinter,
    Gap,
    ModelTokenizer,
    Prompt,
    TokenPrompt,
    Unreadable,
    canonical_chat,
    load_tokenizer,
)
from gateway.fingerprint.canonical import TextPrompt
from gateway.http.body_memory import BodyMemory
from gateway.types import Tenant, TenantId
from kvcontrol.core import BlockHash, CacheIdentity, chain_hashes, root_hash, token_bytes

IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=4)


def threads_of(count: int) -> FairThreads:
    return FairThreads(count, memory=BodyMemory(1 << 30, shed=print), bound=10, ageing_s=10.0, clock=monotonic)


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    with threads_of(1) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load_tokenizer(build_tiny(tmp_path_factory.mktemp("models") / "tiny"))


def tenant(salt: str) -> Tenant:
    return Tenant(id=TenantId(salt), salt=salt)


async def take(
    fingerprinter: Fingerprinter, prompt: Prompt, *, size_bytes: int = 1, salt: str = "s"
) -> Fingerprint | Gap:
    return await fingerprinter.fingerprint(prompt, size_bytes=size_bytes, model="m", tenant=tenant(salt))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (103, 25)])
async def test_a_prompt_of_n_tokens_has_the_hashes_of_its_first_n_minus_1(
    threads: FairThreads, tokens: int, blocks: int
) -> None:
    ids = tuple(range(tokens))
    fingerprint = await take(Fingerprinter(None, threads), TokenPrompt(token_ids=ids))
    assert isinstance(fingerprint, Fingerprint)
    assert fingerprint.tokens == tokens
    expected = chain_hashes(root_hash(IDENTITY, salt="s"), token_bytes(ids), 4)[:blocks]
    assert list(fingerprint.hashes(IDENTITY)) == expected
    assert len(expected) == blocks


async def test_hashes_differ_by_tenant_identity_and_adapter(threads: FairThreads) -> None:
    prompt = TokenPrompt(token_ids=tuple(range(9)))
    fingerprinter = Fingerprinter(None, threads)
    mine, yours = await take(fingerprinter, prompt), await take(fingerprinter, prompt, salt="t")
    adapted = await fingerprinter.fingerprint(prompt, size_bytes=1, model="adapter", tenant=tenant("s"))
    assert isinstance(mine, Fingerprint)
    assert isinstance(yours, Fingerprint)
    assert isinstance(adapted, Fingerprint)
    other = replace(IDENTITY, revision="r2")
    seen = [mine.hashes(IDENTITY), mine.hashes(other), yours.hashes(IDENTITY), adapted.hashes(IDENTITY)]
    assert len({each[0] for each in seen}) == 4
    assert (
        adapted.hashes(IDENTITY)[0]
        == chain_hashes(root_hash(IDENTITY, salt="s", adapter="adapter"), token_bytes(range(4)), 4)[0]
    )


async def test_long_and_short_prompts_have_the_same_fingerprint(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    prompt = ChatPrompt(messages=({"role": "user", "content": "hello " * 50},), kwargs={})
    inline, elsewhere = await take(fingerprinter, prompt), await take(fingerprinter, prompt, size_bytes=1 << 20)
    assert isinstance(inline, Fingerprint)
    assert isinstance(elsewhere, Fingerprint)
    assert inline.hashes(IDENTITY) == elsewhere.hashes(IDENTITY)


async def test_only_what_is_not_remembered_is_encoded_elsewhere(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    assert tokenizer.remembers
    fingerprinter = Fingerprinter(tokenizer, threads)
    prompt = ChatPrompt(messages=({"role": "user", "content": "some words that nobody has said " * 9},), kwargs={})
    first = await take(fingerprinter, prompt, size_bytes=100_000)
    with threads_of(1) as gone:
        pass
    without_threads = Fingerprinter(tokenizer, gone)
    again = await take(without_threads, prompt, size_bytes=100_000)
    assert isinstance(first, Fingerprint)
    assert isinstance(again, Fingerprint)
    assert again.hashes(IDENTITY) == first.hashes(IDENTITY)
    with pytest.raises(RuntimeError, match="shutdown"):
        await take(without_threads, prompt, size_bytes=100_000, salt="another")


async def test_a_turn_more_only_adds_to_a_conversation_that_is_spelled_out(threads: FairThreads) -> None:
    said = ({"role": "system", "content": "be brief " * 99}, {"role": "user", "content": "what is a cache? " * 99})
    parts = ({"role": "user", "content": [{"type": "text", "text": "more " * 300}]}, {"role": "user", "content": "x"})

    async def blocks(*messages: dict[str, Any]) -> list[BlockHash]:
        prompt = ChatPrompt(messages=messages, kwargs={"tools": None})
        taken = await take(Fingerprinter(None, threads), prompt)
        assert isinstance(taken, Fingerprint)
        return list(taken.hashes(IDENTITY))

    short, longer = await blocks(*said), await blocks(*said, *parts)
    assert len(longer) > len(short) > 100
    assert longer[: len(short)] == short
    other = await blocks({"role": "user", "content": said[0]["content"]}, said[1])
    assert other != short


async def test_the_event_loop_goes_on_while_a_long_prompt_is_encoded(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    text = "the quick brown fox jumps over the lazy dog. " * 40_000
    task = asyncio.create_task(take(fingerprinter, TextPrompt(text=text), size_bytes=len(text)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert isinstance(await task, Fingerprint)
    assert turns > 10


@pytest.mark.parametrize(
    ("prompt", "gap"),
    [
        (TextPrompt(text="x"), Gap.NO_TOKENIZER),
        (ChatPrompt(messages=({"role": "user", "content": "x"},), kwargs={}), Gap.NO_TOKENIZER),
        (Unreadable(reason="multimodal"), Gap.MULTIMODAL),
        (Unreadable(reason="several_prompts"), Gap.SEVERAL_PROMPTS),
        (TokenPrompt(token_ids=(-1,)), Gap.BAD_TOKENS),
        (TokenPrompt(token_ids=(1 << 40,)), Gap.BAD_TOKENS),
    ],
)
async def test_what_has_no_fingerprint_says_why(threads: FairThreads, prompt: Prompt, gap: Gap) -> None:
    assert gap_of(await take(Fingerprinter(None, threads), prompt)) is gap


def gap_of(taken: Fingerprint | Gap) -> Gap | None:
    return taken.gap if isinstance(taken, Fingerprint) else taken


async def test_a_conversation_that_can_not_be_tokenized_has_blocks_of_text_and_a_new_turn_only_adds_to_them(
    threads: FairThreads,
) -> None:
    identity = CacheIdentity(model="m", revision="r", kv_dtype="text", block_size_tokens=16)
    fingerprinter = Fingerprinter(None, threads)
    messages = [{"role": "user", "content": "天地玄黄 " * 40}, {"role": "assistant", "content": "\ud800"}]

    async def blocks(*more: dict[str, str], salt: str = "s", **kwargs: object) -> Sequence[bytes]:
        prompt = ChatPrompt(messages=(*messages, *more), kwargs=kwargs)
        taken = await take(fingerprinter, prompt, salt=salt)
        assert isinstance(taken, Fingerprint)
        assert taken.textual
        return taken.hashes(identity)

    first = await blocks()
    longer = await blocks({"role": "user", "content": "more " * 40})
    assert len(longer) > len(first) > 5
    assert longer[: len(first)] == first
    assert (await blocks(salt="t"))[0] != first[0]
    assert (await blocks(tools=[{"name": "x"}]))[0] != first[0]


class _Refusing(ModelTokenizer):
    """A tokenizer whose template refuses every conversation, as some do that don't begin with a user."""

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str:
        del messages, kwargs
        raise ValueError("conversation roles must alternate")


async def test_a_template_that_refuses_is_a_gap_and_not_an_error(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    prompt = ChatPrompt(messages=({"role": "user", "content": "x"},), kwargs={})
    taken = await take(Fingerprinter(_Refusing(tokenizer._tokenizer, tokenizer.memory), threads), prompt)
    assert gap_of(taken) is Gap.TEMPLATE_ERROR


@pytest.mark.parametrize("text", ["\ud800", "half a \udc80 pair"])
async def test_half_a_surrogate_pair_is_a_gap_and_not_an_error(
    tokenizer: ModelTokenizer, threads: FairThreads, text: str
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    assert gap_of(await take(fingerprinter, TextPrompt(text=text))) is Gap.BAD_TEXT
    chat = ChatPrompt(messages=({"role": "user", "content": text},), kwargs={})
    assert gap_of(await take(fingerprinter, chat)) is Gap.BAD_TEXT
    assert gap_of(await take(fingerprinter, chat, size_bytes=1 << 20)) is Gap.BAD_TEXT


def picture(data: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def seen(data: str, *more: str) -> ChatPrompt:
    """A chat of a long text, a picture in the second message, and more."""
    first = {"role": "user", "content": [{"type": "text", "text": "look " * 50}]}
    second = {"role": "user", "content": [{"type": "text", "text": "at this"}, picture(data)]}
    return canonical_chat([first, second, *({"role": "user", "content": text} for text in more)])


async def test_what_stands_before_an_opaque_part_has_the_names_that_it_has_without_it(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    plain = canonical_chat([{"role": "user", "content": "look " * 50}, {"role": "user", "content": "at this"}])
    without, with_one = await take(fingerprinter, plain), await take(fingerprinter, seen("aaaa"))
    assert isinstance(without, Fingerprint)
    assert isinstance(with_one, Fingerprint)
    assert (with_one.gap, with_one.textual) == (Gap.MULTIMODAL, False)
    shared = list(without.hashes(IDENTITY))[:-3]
    assert len(shared) > 10
    assert list(with_one.hashes(IDENTITY))[: len(shared)] == shared


@pytest.mark.parametrize("known", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("data", ["aaaa", "\ud800", "x" * 100_000], ids=["short", "half a pair", "long"])
async def test_equal_opaque_parts_are_equal_and_others_are_not(
    tokenizer: ModelTokenizer, threads: FairThreads, data: str, *, known: bool
) -> None:
    fingerprinter = Fingerprinter(tokenizer if known else None, threads)

    async def hashes(prompt: ChatPrompt) -> list[BlockHash]:
        taken = await take(fingerprinter, prompt)
        assert isinstance(taken, Fingerprint)
        return list(taken.hashes(IDENTITY))

    once, again = await hashes(seen(data, "and " * 20)), await hashes(seen(data, "and " * 20, "then"))
    other = await hashes(seen(data + "b", "and " * 20))
    assert len(once) > 20
    assert again[: len(once) - 2] == once[:-2]
    assert other[:10] == once[:10]
    assert other[-1] != once[-1]


async def test_a_part_that_is_nested_too_deeply_has_no_name_and_is_no_error(
    tokenizer: ModelTokenizer, threads: FairThreads
) -> None:
    deep: object = "x"
    for _ in range(20_000):
        deep = [deep]
    prompt = canonical_chat([{"role": "user", "content": [{"type": "image_url", "image_url": deep}]}])
    for fingerprinter in (Fingerprinter(tokenizer, threads), Fingerprinter(None, threads)):
        assert isinstance(await take(fingerprinter, prompt), Fingerprint)


def test_a_session_names_as_many_blocks_as_its_prompt_has() -> None:
    def named(session: bytes, size_bytes: int) -> list[BlockHash]:
        return list(
            Fingerprint.of_session(session, size_bytes=size_bytes, model="m", salt="s", gap=Gap.SEVERAL_PROMPTS).hashes(
                IDENTITY
            )
        )

    short, long = named(b"one", 1000), named(b"one", 5000)
    assert len(long) > 4 * len(short) > 40
    assert long[: len(short)] == short
    assert named(b"two", 1000)[0] != short[0]


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("block_tokens", [1, 2, 16])
@pytest.mark.parametrize("textual", [False, True])
def test_a_prompt_has_no_more_blocks_than_can_be_hashed_in_time(block_tokens: int, *, textual: bool) -> None:
    """An engine may report blocks of one token: those of a long prompt would hold up the event loop for seconds."""
    packed = bytes(range(256)) * (1 << 13)
    identity = replace(IDENTITY, block_size_tokens=block_tokens)
    made = (
        Fingerprint.of_text(packed, model="m", salt="s", gap=Gap.NO_TOKENIZER)
        if textual
        else Fingerprint(packed, model="m", salt="s")
    )
    hashes = made.hashes(identity)
    assert 1 << 12 < len(hashes) <= 1 << 15
    beginning = Fingerprint(packed[: 1 << 14], model="m", salt="s") if not textual else made
    assert list(hashes[:100]) == list(beginning.hashes(identity)[:100])


async def test_a_run_that_is_too_long_to_be_tokenized_at_once_is_named_by_its_text(
    threads: FairThreads, tokenizer: ModelTokenizer
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    for chars, gap in ((1 << 18, None), ((1 << 18) + 1, Gap.LONG_RUN)):
        for text in ("x" * chars, "some words " * 9 + "<|im_end|>" + "x" * chars):
            found = await take(fingerprinter, TextPrompt(text=text), size_bytes=len(text))
            assert isinstance(found, Fingerprint)
            assert (found.gap, found.textual) == (gap, gap is not None)


async def test_a_prompt_of_thousands_of_special_tokens_or_fields_is_read_in_a_thread_and_has_the_same_tokens(
    threads: FairThreads, tokenizer: ModelTokenizer
) -> None:
    fingerprinter = Fingerprinter(tokenizer, threads)
    prompt = TextPrompt(text="<|im_start|>a" * 3000)
    whole = Fingerprint(tokenizer.encode(prompt.text, salt="s"), model="m", salt="s").hashes(IDENTITY)
    for size, fields in ((1, 0), (50_000, 0), (50_000, 5000), (1 << 20, 0)):
        found = await fingerprinter.fingerprint(prompt, size_bytes=size, model="m", tenant=tenant("s"), fields=fields)
        assert isinstance(found, Fingerprint)
        assert found.hashes(IDENTITY) == whole
