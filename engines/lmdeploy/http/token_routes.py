"""Routes of the api_server that count, encode or score a text, beside its event loop.

LMDeploy tokenizes there on the loop of all streams, and builds a list of all tokens in JSON on it. Handlers that wait
for nothing run in a thread as a whole, up to the bytes of their answer; those that ask the engine get tokens instead
of the text. Tokens and answers are LMDeploy's own.
"""

import inspect
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from engines.lmdeploy.http.prompts import prompts_of, run_to_its_end

Endpoint = Callable[..., Coroutine[Any, Any, Any]]


def _in_a_thread(endpoint: Endpoint, context: Any) -> Endpoint:
    """Run a handler that waits for nothing, and render its answer."""

    async def beside(**given: Any) -> Any:
        prompts = prompts_of(context.async_engine.prompt_processor)
        return await prompts.alone(lambda: _rendered(run_to_its_end(endpoint(**given))))

    return beside


def _with_tokens(endpoint: Endpoint, context: Any) -> Endpoint:
    """Give a handler that asks the engine the tokens of its text, or texts."""

    async def beside(**given: Any) -> Any:
        engine, request = context.async_engine, given["request"]
        texts = [request.input] if isinstance(request.input, str) else request.input
        if texts and all(isinstance(text, str) for text in texts):
            encode = engine.tokenizer.encode
            prompts = prompts_of(engine.prompt_processor)
            tokens = await prompts.alone(lambda: [encode(text) for text in texts])
            request.input = tokens[0] if isinstance(request.input, str) else tokens
        return await endpoint(**given)

    return beside


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
            "/v1/encode": lambda endpoint: _in_a_thread(endpoint, server_context),
            "/pooling": lambda endpoint: _with_tokens(endpoint, server_context),
            "/get_ppl": lambda endpoint: _with_tokens(endpoint, server_context),
        }
        original(_Routes(router, replace), server_context)

    return register


def count_tokens_register(original: Callable[..., None]) -> Callable[..., None]:
    """``register`` of Anthropic's ``count_tokens``."""

    def register(router: Any, server_context: Any, **options: Any) -> None:
        replace = {"/v1/messages/count_tokens": lambda endpoint: _in_a_thread(endpoint, server_context)}
        original(_Routes(router, replace), server_context, **options)

    return register
