"""The parts of OpenAI's and LMDeploy's own request bodies that the gateway looks at; the rest passes through unseen.

Types of fields that only the engine reads are the engine's to check.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt, TextPrompt, TokenPrompt, Unreadable, canonical_chat
from gateway.fingerprint.opaque import Opaque
from kvcontrol.tokenization import MOST_CHARS_PER_TOKEN

_TEMPLATE: Final = "chat_template"
_MOST_INPUTS: Final = 2048
"""OpenAI's bound on the texts of one request for embeddings."""
_TEXTS: Final = ("content", "text", "thinking")
_CHARS_PER_TOKEN: Final = 4
_MOST_STOPS: Final = 64
_MOST_STOP_CHARS: Final = 8192
"""LMDeploy tokenizes each stop text and searches its vocabulary for each, on the event loop of its HTTP server."""


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at in every body."""

    counts_usage: ClassVar[bool] = False
    """Whether a stream reports its usage only when ``stream_options`` asks for it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    migration_request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    with_cache: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    preserve_cache: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    session_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    max_tokens: float | None = None
    stop: Any = None
    stop_sequences: Any = None
    stop_token_ids: Any = None

    @property
    def asks_logprobs(self) -> bool:
        """Whether a completion is to have log probabilities."""
        return False

    def prompt_of(self) -> Prompt:
        """Return the prompt; raises ``InvalidRequestError`` for one that no engine can take."""
        raise NotImplementedError

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens that each answer may have, where the request says so."""
        return None if self.max_tokens is None else int(self.max_tokens)

    @property
    def prompts(self) -> int:
        """How many prompts there are, at least 1."""
        return 1

    @property
    def answers(self) -> int:
        """How many answers are asked for to all prompts together, at least 1."""
        return self.prompts

    def check_fan_out(self, most_answers: int) -> None:
        """Raise ``InvalidRequestError`` for a request that an engine would have to run too many sequences for."""
        if self.answers > most_answers:
            raise InvalidRequestError(
                f"the request needs {self.answers} answers (prompts times n or best_of); at most {most_answers} "
                "are allowed: send several requests",
                param="n" if self.answers > self.prompts else "prompt",
                code="too_many_answers",
            )
        for name in ("stop", "stop_sequences", "stop_token_ids"):
            if stops := getattr(self, name):
                _check_stops(stops, name)


class Message(msgspec.Struct, frozen=True):
    """Only what must hold of every message; the template gets the message as it came."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    counts_usage = True

    messages: list[dict[str, Any]]
    n: int | None = None
    max_completion_tokens: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None

    @property
    def answer_tokens(self) -> int | None:
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if most is None else int(most)

    @property
    def answers(self) -> int:
        return max(1, self.n or 1)

    def prompt_of(self) -> Prompt:
        check_template_kwargs(self.chat_template_kwargs)
        if self.input_ids is not None:
            check_tokens(self.input_ids, "input_ids")
        if not self.messages and self.input_ids is not None:
            return with_images(self.input_ids, self.image_data)
        if not self.messages:
            raise InvalidRequestError("messages: is empty; at least one message is needed", param="messages")
        return canonical_chat(
            self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            reasoning_effort=self.reasoning_effort,
        )


class GenerateBody(Body, frozen=True, kw_only=True):
    """``POST /generate``, LMDeploy's own: text or token ids as they are, usage in every event, no model needed."""

    prompt: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None

    def prompt_of(self) -> Prompt:
        if (self.prompt is None) == (self.input_ids is None):
            raise InvalidRequestError("give either prompt or input_ids", param="prompt")
        if self.input_ids is not None:
            check_tokens(self.input_ids, "input_ids")
            return with_images(self.input_ids, self.image_data)
        _check_text(self.prompt, "prompt")
        if self.image_data is not None:
            return with_images(self.prompt, self.image_data)
        return TextPrompt(text=self.prompt or "")


class OtherBody(Body, frozen=True, kw_only=True):
    """A request that generates nothing, so that no cached prefix helps it: embeddings, counting, tokenizing."""

    def prompt_of(self) -> Prompt:
        return Unreadable(reason="no_generation")


class CountBody(OtherBody, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: the engine tokenizes the texts of a body whose form it checks."""

    messages: Any = None
    system: Any = None

    def prompt_of(self) -> Prompt:
        return Unreadable(reason="no_generation", chars=_chars_of(self.system) + _chars_of(self.messages))


class EmbeddingsBody(OtherBody, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[Any]

    def check_fan_out(self, most_answers: int) -> None:
        """As for others, by OpenAI's bound. All texts are one request: nothing is generated for any."""
        del most_answers
        _check_texts(_count(self.input), "input")

    def prompt_of(self) -> Prompt:
        if not self.input:
            raise _empty("input")
        prompts = self.input if isinstance(self.input, list) and isinstance(self.input[0], str | list) else [self.input]
        return Unreadable(reason="no_generation", chars=max(map(_most_chars, prompts)))


class RerankBody(OtherBody, frozen=True, kw_only=True):
    """``POST /v1/rerank`` in the form of Jina's API: documents in the order of their relevance to a query."""

    query: str
    documents: list[Any]

    def check_fan_out(self, most_answers: int) -> None:
        """As for embeddings: all documents are one request."""
        del most_answers
        _check_texts(len(self.documents), "documents")

    def prompt_of(self) -> Prompt:
        if not self.documents:
            raise _empty("documents")
        longest = max(map(_chars_of, self.documents))
        return Unreadable(reason="no_generation", chars=len(self.query) + longest)


class CompletionBody(Body, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    counts_usage = True

    prompt: str | list[Any]
    n: int | None = None
    best_of: int | None = None
    logprobs: Any = None

    @property
    def asks_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def prompts(self) -> int:
        return _count(self.prompt)

    @property
    def answers(self) -> int:
        return max(1, self.n or 1, self.best_of or 1) * self.prompts

    def prompt_of(self) -> Prompt:
        match self.prompt:
            case str(text):
                _check_text(text, "prompt")
                return TextPrompt(text=text)
            case []:
                raise _empty("prompt")
            case [str(), *_] as texts:
                for number, each in enumerate(texts):
                    _check_text(each, f"prompt[{number}]")
                if len(texts) == 1:
                    return TextPrompt(text=texts[0])
                return _several(sum(-(-len(each) // _CHARS_PER_TOKEN) for each in texts))
            case [list(), *_] as lists:
                for number, each in enumerate(lists):
                    check_tokens(each, f"prompt[{number}]")
                return TokenPrompt(token_ids=tuple(lists[0])) if len(lists) == 1 else _several(sum(map(len, lists)))
            case ids:
                check_tokens(ids, "prompt")
                return TokenPrompt(token_ids=tuple(ids))


def _check_texts(count: int, where: str) -> None:
    if count > _MOST_INPUTS:
        raise InvalidRequestError(
            f"{where}: has {count} texts; at most {_MOST_INPUTS} are allowed: send several requests",
            param=where,
            code="too_many_inputs",
        )


def _most_chars(prompt: Any) -> int:
    """How long the text of a prompt is, at most where it is token ids; 0 for what is neither."""
    match prompt:
        case str():
            return len(prompt)
        case list():
            return len(prompt) * MOST_CHARS_PER_TOKEN
        case _:
            return 0


def _count(prompts: str | list[Any]) -> int:
    """How many prompts a text, a list of texts, of token ids or of lists of token ids is."""
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1


def _check_stops(stops: object, name: str) -> None:
    """Raise ``InvalidRequestError`` for stops that would occupy an engine's server; their types are the engine's."""
    texts = stops if isinstance(stops, list) else [stops]
    if len(texts) > _MOST_STOPS:
        count = f"{len(texts)} entries; at most {_MOST_STOPS} are"
    elif (chars := sum(len(each) for each in texts if isinstance(each, str))) > _MOST_STOP_CHARS:
        count = f"{chars} characters; at most {_MOST_STOP_CHARS} are"
    else:
        return
    raise InvalidRequestError(
        f"{name}: has {count} allowed: send fewer or shorter ones", param=name, code="too_many_stops"
    )


def _several(tokens: int) -> Unreadable:
    return Unreadable(reason="several_prompts", tokens=tokens)


def _check_text(text: object, where: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}: expected a text like those before it", param=where)
    if not text:
        raise _empty(where)


def check_tokens(ids: object, where: str) -> None:
    """Engines take a negative or broken token id for granted and fall over it."""
    if not isinstance(ids, list):
        raise InvalidRequestError(f"{where}: expected a list of token ids like those before it", param=where)
    if not ids:
        raise _empty(where)
    if all(type(token) is int for token in ids) and min(ids) >= 0:
        return
    number, token = next((number, token) for number, token in enumerate(ids) if type(token) is not int or token < 0)
    shown = token if type(token) in {int, float, bool} else f"a {type(token).__name__}"
    raise InvalidRequestError(
        f"{where}[{number}]: is {shown}; a token id is an integer, at least 0", param=f"{where}[{number}]"
    )


def with_images(prompt: str | list[int] | None, images: Any) -> Prompt:
    """Return a prompt of text or token ids that images may come with: LMDeploy makes a user's message of both then."""
    if images is None and isinstance(prompt, list):
        return TokenPrompt(token_ids=tuple(prompt))
    parts = [{"type": "text", "text": prompt} if isinstance(prompt, str) else Opaque(prompt, "multimodal")]
    parts += [Opaque(each, "multimodal") for each in (images if isinstance(images, list) else [images])]
    return canonical_chat([{"role": "user", "content": parts}])


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> None:
    """A template is a program, and one of a client's would run here and in the engine for as long as it likes."""
    if kwargs is not None and _TEMPLATE in kwargs:
        where = f"chat_template_kwargs.{_TEMPLATE}"
        raise InvalidRequestError(f"{where}: the model's own template is used, and no other", param=where)


def _empty(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: is empty; a prompt has at least one token", param=where)


def _chars_of(entry: Any) -> int:
    """The characters of all texts in messages and their blocks; images are none."""
    match entry:
        case str():
            return len(entry)
        case list():
            return sum(map(_chars_of, entry))
        case {}:
            return sum(_chars_of(entry.get(name)) for name in _TEXTS)
        case _:
            return 0
