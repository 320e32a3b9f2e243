"""Routes of the api_server that count, encode or score a text, beside its event loop.

LMDeploy tokenizes there on the loop of all streams, and builds a list of all tokens in JSON on it. Handlers that wait
for nothing run in a thread as a whole, up to the bytes of their answer; those that ask the engine get tokens instead
of the text. Tokens and answers are LMDeploy's own.
"""

import inspect
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from engines.lmdeploy.http.admission import limits_of
from engines.lmdeploy.http.prompts import prompts_of, run_to_its_end
from engines.requests.completions import MOST_ANSWERS
from engines.requests.completions import prompts_of as prompts_in
from engines.requests.limits import EngineLimits, RefusedError, TooLongError, check_length, check_prompt
from kvcontrol.tokenization import least_tokens

Endpoint = Callable[..., Coroutine[Any, Any, Any]]


_MOST_TEXTS: Final = 2048
"""OpenAI's bound on the texts of one request that generates nothing."""
_NO_TEXT: Final = frozenset({"data", "source", "url"})
"""Fields whose strings are bytes of images and documents, or where to find them."""


def _threaded(endpoint: Endpoint, context: Any, check: Callable[[Any, EngineLimits], None]) -> Endpoint:
    """Run a handler that waits for nothing, and render its answer; ``check`` raises ``RefusedError`` for a body."""

    async def beside(**given: Any) -> Any:
        prompts, limits = prompts_of(context.async_engine.prompt_processor), limits_of(context.async_engine)
        body = await given["raw_request"].json()  # kept by the request, so that nothing is parsed twice

        def work() -> Any:
            if limits is not None:
                check(body, limits)
            return _rendered(run_to_its_end(endpoint(**given)))

        return await _or_refused(given["raw_request"], prompts.alone(work))

    return beside


def _with_tokens(endpoint: Endpoint, context: Any) -> Endpoint:
    """Give a handler that asks the engine the tokens of its text, or texts."""

    async def beside(**given: Any) -> Any:
        engine, request = context.async_engine, given["request"]
        if engine.is_sleeping:
            raise _asleep()
        limits, texts = limits_of(engine), [request.input] if isinstance(request.input, str) else request.input
        encode = engine.tokenizer.encode
        prompts = prompts_of(engine.prompt_processor)

        def work() -> Any:
            if limits is not None:
                _check_prompts(request.input, limits)
            if texts and all(isinstance(text, str) for text in texts):
                tokens = [encode(text) for text in texts]
                request.input = tokens[0] if isinstance(request.input, str) else tokens
            if limits is not None:
                _check_tokens(request.input, limits)

        async def answer() -> Any:
            await prompts.alone(work)
            try:
                return await endpoint(**given)
            except ValueError as error:  # the model or the engine's options have no such route
                raise RefusedError(str(error)) from error

        return await _or_refused(given["raw_request"], answer())

    return beside


def _asleep() -> Exception:
    """What LMDeploy answers on its other routes of inference; on these a request would wait for the engine to wake."""
    from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

    error: Exception = RequestError(
        ErrorCode.ENGINE_UNAVAILABLE, "the engine is sleeping; wake it with POST /wakeup, then ask again"
    )
    return error


def _check_encode(body: Any, limits: EngineLimits) -> None:
    """Refuse texts to encode that are too many, or too long together."""
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    _check_count(len(texts), _MOST_TEXTS)
    check_length(least_tokens(sum(map(len, texts))), limits)


def _check_count_tokens(body: Any, limits: EngineLimits) -> None:
    """Refuse messages to count whose texts are too long together."""
    check_length(least_tokens(_chars_of(body)), limits)


def _check_prompts(given: Any, limits: EngineLimits) -> None:
    """Refuse prompts that are too many, or texts among them that are too long to be worth tokenizing."""
    prompts = prompts_in(given)
    _check_count(len(prompts), MOST_ANSWERS)
    for each in prompts:
        if isinstance(each, str):
            check_length(least_tokens(len(each)), limits)


def _check_tokens(given: Any, limits: EngineLimits) -> None:
    """Refuse tokenized prompts that the engine can't take. The route itself refuses a body without prompts."""
    for each in prompts_in(given) if given else ():
        check_prompt(each, limits)
        check_length(len(each), limits)


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise RefusedError(f"input has {count} entries; at most {most} are allowed: send several requests")


def _chars_of(value: Any) -> int:
    """The characters of all texts in a body; images are none."""
    match value:
        case str():
            return len(value)
        case list():
            return sum(map(_chars_of, value))
        case {}:
            return sum(_chars_of(each) for name, each in value.items() if name not in _NO_TEXT)
        case _:
            return 0


async def _or_refused(raw_request: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """Return what work returns, or the answer to a body that it refused, in the words of the route's API."""
    from http import HTTPStatus

    from fastapi.responses import JSONResponse
    from lmdeploy.serve.anthropic import errors as anthropic

    try:
        return await work
    except RefusedError as error:
        if raw_request.url.path.startswith("/v1/messages"):
            words = str(error)
            if isinstance(error, TooLongError):
                words = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
            return anthropic.create_error_response(HTTPStatus.BAD_REQUEST, words)
        code = "context_length_exceeded" if isinstance(error, TooLongError) else "invalid_request"
        answer = {"object": "error", "message": str(error), "type": "invalid_request_error", "param": "input"}
        return JSONResponse(answer | {"code": code}, status_code=HTTPStatus.BAD_REQUEST)


def _rendered(answer: Any) -> Any:
    from fastapi import Response
    from pydantic import BaseModel

    if not isinstance(answer, BaseModel):
        return answer
    return Response(answer.model_dump_json(), media_type="application/json")


class _Routes:
    """FastAPI's ``APIRouter``, some of whose handlers are replaced as they are added."""

    def __init__(self, router: Any, replace: Mapping[str, Callable[[Endpoint], Endpoint]]) -> None:
        self._router = router
        self._replace = replace

    def post(self, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
        add: Callable[[Endpoint], Endpoint] = self._router.post(path, **options)
        replace = self._replace.get(path)
        return add if replace is None else lambda endpoint: add(_like(endpoint, replace(endpoint)))


def _like(endpoint: Endpoint, replaced: Endpoint) -> Endpoint:
    """Let FastAPI see a handler's own parameters, name and text; it reads annotations in the handler's module."""
    kinds = typing.get_type_hints(endpoint)
    signature = inspect.signature(endpoint)
    parameters = [each.replace(annotation=kinds.get(each.name, Any)) for each in signature.parameters.values()]
    replaced.__name__, replaced.__doc__ = endpoint.__name__, endpoint.__doc__
    replaced.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return replaced


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def auxiliary_register(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``register`` of LMDeploy's auxiliary endpoints."""

    def register(router: Any, server_context: Any) -> None:
        replace = {
            "/v1/encode": lambda endpoint: _threaded(endpoint, server_context, _check_encode),
            "/pooling": lambda endpoint: _with_tokens(endpoint, server_context),
            "/get_ppl": lambda endpoint: _with_tokens(endpoint, server_context),
        }
        original(_Routes(router, replace), server_context)

    return register


def count_tokens_register(original: Callable[..., None]) -> Callable[..., None]:
    """``register`` of Anthropic's ``count_tokens``."""

    def register(router: Any, server_context: Any, **options: Any) -> None:
        path = "/v1/messages/count_tokens"
        replace = {path: lambda endpoint: _threaded(endpoint, server_context, _check_count_tokens)}
        original(_Routes(router, replace), server_context, **options)

    return register
