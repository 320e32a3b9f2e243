"""``/tokenize`` and ``/detokenize`` as vLLM shapes them, answered by the gateway's own tokenizer.

LMDeploy has neither (its ``/v1/encode`` only encodes). Without a tokenizer here both are passed on to the engine, for
engines that have them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from gateway.admission.fair_threads import FairThreads
from gateway.errors import ContextLengthError, InvalidRequestError
from gateway.errors.context_length import ContextLength
from gateway.fingerprint.canonical import canonical_chat
from gateway.fingerprint.tokenizer import LongRunError, ModelTokenizer
from gateway.http.body_memory import SPELLING_TIMES
from gateway.registry import Registry
from gateway.registry.missing_model import missing_model
from gateway.requests.bodies import check_template_kwargs, check_tokens
from gateway.requests.shape import check_shape
from gateway.types import Operation, Tenant
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.tokenization import least_tokens

TOKEN_OPERATIONS: Final = frozenset({Operation.TOKENIZE, Operation.DETOKENIZE})

_TOKENS_AT_ONCE: Final = 1 << 14
"""As many become numbers and texts of Python at a time, which take 100 bytes each."""


class _Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


_Parsed = TypeVar("_Parsed", _Tokenize, _Detokenize)


class TokenApi:
    """Stateless; the work is done on ``threads``, so that the event loop goes on."""

    def __init__(self, *, tokenizer: ModelTokenizer, threads: FairThreads, registry: Registry) -> None:
        self._tokenizer = tokenizer
        self._threads = threads
        self._registry = registry

    async def answer(self, operation: Operation, body: bytes, tenant: Tenant) -> tuple[str | None, bytes]:
        """Return the model that a request names and its answer; raises ``ApiError``."""
        work = partial(self._tokenize, salt=tenant.salt) if operation is Operation.TOKENIZE else self._detokenize
        return await self._threads.run(partial(work, body), tenant=tenant, size_bytes=len(body), times=SPELLING_TIMES)

    def _tokenize(self, body: bytes, *, salt: str) -> tuple[str | None, bytes]:
        parsed = _parsed(body, _Tokenize)
        self._check_model(parsed.model)
        if (parsed.prompt is None) == (parsed.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if parsed.prompt is not None:
            text, special = parsed.prompt, parsed.add_special_tokens
        else:
            text, special = self._rendered(parsed), True
        self._check_length(text)
        try:
            packed = self._tokenizer.packed_ids(text, special=special, salt=salt)
        except UnicodeEncodeError:
            raise InvalidRequestError("prompt: holds half a surrogate pair", param="prompt") from None
        except LongRunError as error:
            raise InvalidRequestError(f"prompt: {error}", param="prompt") from None
        return parsed.model, self._answer_of(packed, with_texts=parsed.return_token_strs)

    def _answer_of(self, packed: bytes, *, with_texts: bool) -> bytes:
        """The answer to ``/tokenize``; its lists are written in parts."""
        ids = memoryview(packed).cast("I")
        texts = b"[%b]" % _listed(ids, self._tokenizer.token_texts) if with_texts else b"null"
        head = msgspec.json.encode({"count": len(ids), "max_model_len": self._context_length()})
        return b'%b,"tokens":[%b],"token_strs":%b}' % (head[:-1], _listed(ids, list), texts)

    def _rendered(self, parsed: _Tokenize) -> str:
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError("messages: this model has no chat template", param="messages")
        if not parsed.messages:
            raise InvalidRequestError("messages: is empty; at least one message is needed", param="messages")
        check_template_kwargs(parsed.chat_template_kwargs)
        prompt = canonical_chat(parsed.messages, tools=parsed.tools, template_kwargs=parsed.chat_template_kwargs)
        if prompt.gap is not None:
            raise InvalidRequestError("messages: only text can be tokenized here", param="messages")
        try:
            return self._tokenizer.render(prompt.messages, prompt.kwargs)
        except Exception as error:
            raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from error

    def _detokenize(self, body: bytes) -> tuple[str | None, bytes]:
        parsed = _parsed(body, _Detokenize)
        self._check_model(parsed.model)
        if parsed.tokens:
            check_tokens(parsed.tokens, "tokens")
        try:
            text = self._tokenizer.text_of(parsed.tokens)
        except (OverflowError, IndexError):
            raise InvalidRequestError("tokens: an id is beyond the vocabulary", param="tokens") from None
        return parsed.model, msgspec.json.encode({"prompt": text})

    def _check_model(self, model: str | None) -> None:
        if model is not None and not self._registry.models.knows(model):
            raise missing_model(self._registry, model)

    def _check_length(self, text: str) -> None:
        """Raise ``ContextLengthError`` for a text that is far too long: its tokens take many times its memory."""
        most = self._context_length()
        least = least_tokens(len(text))
        if most is not None and least > most:
            raise ContextLengthError(
                f"the text has at least {least} tokens; the model's context has {most}: send it in parts",
                ContextLength(prompt_tokens=least, maximum_tokens=most),
            )

    def _context_length(self) -> int | None:
        known = [
            each.stats.context_length_tokens for each in self._registry.available.serving() if each.stats is not None
        ]
        return min(known, default=None)


def _listed(ids: "memoryview[int]", spell: Callable[[list[int]], list[Any]]) -> bytes:
    """The items of a JSON list: what each token is spelled as."""
    starts = range(0, len(ids), _TOKENS_AT_ONCE)
    return b",".join(msgspec.json.encode(spell(ids[each : each + _TOKENS_AT_ONCE].tolist()))[1:-1] for each in starts)


def _parsed(body: bytes, kind: type[_Parsed]) -> _Parsed:
    check_shape(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the request body: {error}") from None
    except UNREADABLE as error:
        raise InvalidRequestError(f"the request body is not JSON: {error}", code="invalid_json") from None
