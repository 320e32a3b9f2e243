"""What a body of ``/v1/completions`` becomes: prompts, each with the answers that are asked for, in a bounded number.

LMDeploy takes each entry of a list as a prompt of its own, a token id too, and answers each once, whatever ``n`` says.
It streams the answers one after the other, all with index 0. OpenAI's API has a list of token ids as one prompt, and
the answers to prompt i at the indices from i * n on.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from engines.requests.completions import problem_of, prompts_of

_DATA: Final = "data: "
_DONE: Final = "data: [DONE]"


async def numbered(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Give each of the answers in a stream its index; an answer ends with its finish reason."""
    index = 0
    async for event in events:
        chunk = None if event.startswith(_DONE) else json.loads(event.removeprefix(_DATA))
        if chunk is None or not chunk.get("choices"):
            yield event
            continue
        for choice in chunk["choices"]:
            choice["index"] = index
        yield f"{_DATA}{json.dumps(chunk)}\n\n"
        index += any(choice.get("finish_reason") for choice in chunk["choices"])


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def check_request(original: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """``check_request`` of completions, in the api_server, where a request comes by before it has sessions."""

    def check_request(request: Any, server_context: Any) -> str:
        refused = original(request, server_context)
        if refused:
            return refused
        prompts = prompts_of(request.prompt)
        problem = problem_of(len(prompts), request.n)
        if problem is not None:
            return problem
        if request.n > 1 or isinstance(request.prompt, list):
            request.prompt = [prompt for prompt in prompts for _ in range(request.n)]
        return ""

    return check_request


def with_request_cleanup(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """``with_request_cleanup`` of completions: it gets the stream of a request with the sessions of its answers."""

    def with_request_cleanup(
        generator: AsyncIterator[Any], result_generators: Any, sessions: Sequence[Any], session_mgr: Any
    ) -> AsyncIterator[Any]:
        chunks = numbered(generator) if len(sessions) > 1 else generator
        return original(chunks, result_generators, sessions, session_mgr)

    return with_request_cleanup
