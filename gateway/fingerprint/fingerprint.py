"""A prompt's identity: its tokens, and from them the hashes of its full blocks.

Tokens depend on the model alone; hashes also on what an instance reports about its cache (``CacheIdentity``) and on the
tenant's salt. LMDeploy never takes the last prompt token from its cache, so the block that would hold it is left out: a
prompt of n tokens has floor((n - 1) / block size) hashes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from xxhash import xxh3_128

from gateway.fingerprint.canonical import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Unreadable
from gateway.fingerprint.opaque import as_json, spelled_out
from gateway.fingerprint.tokenizer import LongRunError, ModelTokenizer
from gateway.http.body_memory import TOKENIZING_TIMES
from gateway.types import Tenant
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES, chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.tokenization import ManyPiecesError, Sought

T = TypeVar("T")

_MOST_TEXT_BYTES = 512 << 10
"""What is beyond belongs to no block: a prompt's place is decided long before."""
_MOST_HASHED_TOKENS = 1 << 20
"""The same of tokens, whose hashes take some 25 ms."""
_MOST_BLOCKS = 1 << 15
"""The same of blocks: those of one token, as an engine may report them, cost as much as those of a thousand."""
_INLINE_TEXT_BYTES = 512 << 10
"""Longer texts are spelled out and hashed off the event loop, when they are not tokenized: half a millisecond of work.
A thread would be a tenth of one for 128 KB, beside which its wake-ups are as much again.
"""
_INLINE_CHARS = 8192
"""Longer prompts are encoded off the event loop: about 2 ms of work, where a thread hop costs 0.1 ms."""


_INLINE_LOOK_UP_BYTES = 256 << 10
"""Up to here it is seen on the event loop whether a prompt is remembered: half a millisecond of work, and most are."""
_INLINE_PIECES = 2048
"""Up to so many of them: a special token with a text behind it takes three microseconds."""
_FIELD_BYTES = 128
"""What a field of a body counts beside its bytes: to render a message of two takes ten microseconds."""
_PLAIN_FIELDS = 2
"""Role and content."""


class Gap(StrEnum):
    """Why a prompt has no fingerprint, or one that names only a part of it as engines do."""

    NO_TOKENIZER = "no_tokenizer"
    NO_CHAT_TEMPLATE = "no_chat_template"
    TEMPLATE_ERROR = "template_error"
    MULTIMODAL = "multimodal"
    SEVERAL_PROMPTS = "several_prompts"
    BAD_TOKENS = "bad_tokens"
    BAD_TEXT = "bad_text"
    LONG_RUN = "long_run"
    NO_GENERATION = "no_generation"
    UNKNOWN_PARTS = "unknown_parts"


class Fingerprint:
    """One prompt of one tenant. Hashes are computed once for each requested cache identity.

    ``gap`` says why they are no engine's names for all blocks: the prompt is ``textual``, or has an opaque part, whose
    digest stands for it from there on. Equal beginnings have equal hashes all the same.
    """

    __slots__ = ("_by_root", "_packed", "_salt", "gap", "model", "textual", "tokens")

    def __init__(self, packed: bytes, *, model: str, salt: str, gap: Gap | None = None) -> None:
        self._packed = packed
        self.model = model
        self._salt = salt
        self._by_root: dict[BlockHash, Sequence[BlockHash]] = {}
        self.gap = gap
        self.textual = False
        self.tokens = len(packed) // TOKEN_BYTES

    @classmethod
    def of_text(cls, text: bytes, *, model: str, salt: str, gap: Gap) -> "Fingerprint":
        """Return the text as a stand-in for a prompt that can't be tokenized here; ``gap`` is the reason.

        Four bytes count as a token, about what they are in English. It names no engine's blocks, but equal beginnings
        have equal hashes: enough to learn where they were sent. Of a very long one only the beginning is hashed.
        """
        fingerprint = cls(text[:_MOST_TEXT_BYTES], model=model, salt=salt)
        fingerprint.tokens = -(-len(text) // TOKEN_BYTES)
        fingerprint.gap = gap
        fingerprint.textual = True
        return fingerprint

    @classmethod
    def of_session(cls, session: bytes, *, size_bytes: int, model: str, salt: str, gap: Gap) -> "Fingerprint":
        """Return a stand-in for a prompt of so many bytes that has nothing but the session it belongs to: the session's
        digest, as often as it takes.
        """
        digest = xxh3_128(session).digest()
        text = digest * -(-min(size_bytes, _MOST_TEXT_BYTES) // len(digest))
        return cls.of_text(text, model=model, salt=salt, gap=gap)

    def beginning(self, tokens: int) -> bytes:
        """Return what prompts of one tenant and model share that begin alike, for so many tokens."""
        return b"\x00".join((self.model.encode(), self._salt.encode(), self._packed[: tokens * TOKEN_BYTES]))

    def hashes(self, identity: CacheIdentity) -> Sequence[BlockHash]:
        """Return the hashes of the blocks that could be reused, in order. O(tokens) at first, then O(1).

        A requested model that is not the identity's own is an adapter on it, as in LMDeploy.
        """
        adapter = "" if self.model == identity.model else self.model
        root = root_hash(identity, salt=self._salt, adapter=adapter)
        known = self._by_root.get(root)
        if known is None:
            size = identity.block_size_tokens
            most = min(self.tokens - 1, len(self._packed) // TOKEN_BYTES, _MOST_HASHED_TOKENS)
            usable = min(max(0, most) // size, _MOST_BLOCKS) * size * TOKEN_BYTES
            chain = _text_hashes if self.textual else chain_hashes
            known = self._by_root[root] = chain(root, self._packed[:usable], size)
        return known


def _text_hashes(root: BlockHash, text: bytes, block_size_tokens: int) -> list[BlockHash]:
    """Name blocks of text, by a hash that is not cryptographic and 100 times as fast as ``chain_hashes``: each block by
    the hash of all text up to its end, which one state gives in passing.

    These name no block of any engine: whoever makes two of them equal misleads the routing of their own prompts, as the
    root has their tenant's salt in it.
    """
    width = block_size_tokens * TOKEN_BYTES
    hashes: list[bytes] = []
    append, view, state = hashes.append, memoryview(text), xxh3_128(root)
    update, digest = state.update, state.digest
    for start in range(0, len(text), width):
        update(view[start : start + width])
        append(digest())
    return cast("list[BlockHash]", hashes)


class KnownBlocks(Fingerprint):
    """A prompt of which only the hashes of its full blocks are known."""

    __slots__ = ("_hashes",)

    def __init__(self, hashes: Sequence[BlockHash], *, model: str, block_size_tokens: int) -> None:
        super().__init__(b"", model=model, salt="")
        self._hashes = hashes
        self.tokens = len(hashes) * block_size_tokens + 1

    def hashes(self, identity: CacheIdentity) -> Sequence[BlockHash]:
        """Return the hashes, whatever the identity."""
        del identity
        return self._hashes

    def beginning(self, tokens: int) -> bytes:
        del tokens
        return b"".join(self._hashes[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Textual:
    text: bytes
    gap: Gap


class Threads(Protocol):
    """Where long work is done, for one tenant after the other."""

    async def run(self, work: Callable[[], T], *, tenant: Tenant, size_bytes: int, times: int = 0) -> T: ...


class Fingerprinter:
    """Turns prompts into fingerprints; long ones on ``threads``, to keep the event loop free."""

    def __init__(self, tokenizer: ModelTokenizer | None, threads: Threads) -> None:
        self._tokenizer = tokenizer
        self._threads = threads

    async def fingerprint(
        self, prompt: Prompt, *, size_bytes: int, model: str, tenant: Tenant, fields: int = 0
    ) -> Fingerprint | Gap:
        """Return the prompt's fingerprint, or why it has none; never raises on account of the prompt.

        ``size_bytes`` is about how long the prompt is, ``fields`` how many it was read from. Raises
        ``RateLimitedError`` when too much waits for a thread.
        """
        salt = tenant.salt
        weight = size_bytes + _FIELD_BYTES * fields
        if self._tokenizer is None:
            inline = weight <= _INLINE_TEXT_BYTES
        else:
            inline = size_bytes <= _INLINE_CHARS and self._tokenizer.thread_safe
        begun: _Encoded | Sought | _Textual | Gap | None = None
        if inline or (isinstance(prompt, TokenPrompt) and size_bytes <= _INLINE_LOOK_UP_BYTES):
            begun = self._encode(prompt, salt)
        elif self._tokenizer is not None and self._tokenizer.remembers and weight <= _INLINE_LOOK_UP_BYTES:
            begun = self._looked_up(prompt, salt)
        if begun is None:
            work = partial(self._encode, prompt, salt)
            encoded = await self._threads.run(work, tenant=tenant, size_bytes=size_bytes, times=TOKENIZING_TIMES)
        elif not isinstance(begun, Sought):
            encoded = begun
        elif begun.complete:
            encoded = _Encoded(packed=begun.ids())
        else:
            ids = await self._threads.run(begun.ids, tenant=tenant, size_bytes=size_bytes, times=TOKENIZING_TIMES)
            encoded = _Encoded(packed=ids)
        if isinstance(encoded, _Textual):
            return Fingerprint.of_text(encoded.text, model=model, salt=salt, gap=encoded.gap)
        if isinstance(encoded, Gap):
            return encoded
        gap = Gap(prompt.gap) if isinstance(prompt, ChatPrompt) and prompt.gap is not None else None
        return Fingerprint(encoded.packed, model=model, salt=salt, gap=gap)

    def _encode(self, prompt: Prompt, salt: str) -> _Encoded | _Textual | Gap:
        begun = self._begin(prompt, salt)
        return _Encoded(packed=begun.ids()) if isinstance(begun, Sought) else begun

    def _looked_up(self, prompt: Prompt, salt: str) -> _Encoded | Sought | _Textual | Gap | None:
        """What is remembered of a prompt; None where to look it up would take long."""
        try:
            return self._begin(prompt, salt, _INLINE_PIECES)
        except ManyPiecesError:
            return None

    def _begin(self, prompt: Prompt, salt: str, most_pieces: int | None = None) -> _Encoded | Sought | _Textual | Gap:
        """All of the work, except for encoding what is not remembered where there is a memory.

        Raises ``ManyPiecesError``.
        """
        try:
            return self._begin_any(prompt, salt, most_pieces)
        except RecursionError:  # what could be read need not be shallow enough to be written again
            return Gap.UNKNOWN_PARTS

    def _begin_any(self, prompt: Prompt, salt: str, most_pieces: int | None) -> _Encoded | Sought | _Textual | Gap:
        match prompt:
            case Unreadable():
                return Gap(prompt.reason)
            case TokenPrompt():
                try:
                    return _Encoded(packed=token_bytes(prompt.token_ids))
                except OverflowError:
                    return Gap.BAD_TOKENS
            case TextPrompt():
                if self._tokenizer is None:
                    return _Textual(text=prompt.text.encode("utf-8", "surrogatepass"), gap=Gap.NO_TOKENIZER)
                return self._begin_text(prompt.text, salt, self._tokenizer, most_pieces)
            case ChatPrompt():
                return self._begin_chat(prompt, salt, most_pieces)

    def _begin_chat(self, prompt: ChatPrompt, salt: str, most_pieces: int | None) -> _Encoded | Sought | _Textual | Gap:
        messages = prompt.messages if prompt.gap is None else spelled_out(prompt.messages)
        if self._tokenizer is None:
            return _Textual(text=_spelled(messages, prompt.kwargs), gap=Gap.NO_TOKENIZER)
        if not self._tokenizer.has_chat_template:
            return _Textual(text=_spelled(messages, prompt.kwargs), gap=Gap.NO_CHAT_TEMPLATE)
        try:
            text = self._tokenizer.render(messages, prompt.kwargs, inline_system=prompt.inline_system)
        except Exception:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
            return _Textual(text=_spelled(messages, prompt.kwargs), gap=Gap.TEMPLATE_ERROR)
        return self._begin_text(text, salt, self._tokenizer, most_pieces)

    def _begin_text(
        self, text: str, salt: str, tokenizer: ModelTokenizer, most_pieces: int | None
    ) -> _Encoded | Sought | _Textual:
        try:
            sought = tokenizer.look_up(text, salt=salt, most_pieces=most_pieces)
            return sought or _Encoded(packed=tokenizer.encode(text, salt=salt))
        except UnicodeEncodeError:  # half a surrogate pair, which JSON may spell
            return _Textual(text=text.encode("utf-8", "surrogatepass"), gap=Gap.BAD_TEXT)
        except LongRunError:
            return _Textual(text=text.encode("utf-8", "surrogatepass"), gap=Gap.LONG_RUN)


def _spelled(messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> bytes:
    """A conversation as text of our own, what templates put first first: a new turn only adds to its end.

    Plain messages are role and text as they are: to write them as JSON takes eight times as long. That a text could
    imitate two messages misleads only the routing of whoever sends it.
    """
    parts = [as_json(kwargs)] if kwargs else []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) == _PLAIN_FIELDS and isinstance(role, str) and isinstance(content, str):
            parts += (role.encode("utf-8", "surrogatepass"), content.encode("utf-8", "surrogatepass"))
        else:
            parts.append(_or_deep(message))
    return b"\n".join(parts)


def _or_deep(message: Mapping[str, Any]) -> bytes:
    """Return a message as JSON, or one fixed name for all messages that are nested too deep to be written."""
    try:
        return as_json(message)
    except RecursionError:
        return b"<deep>"
