"""What a body of ``/v1/completions`` becomes: prompts, each with the answers that are asked for, in a bounded number.

LMDeploy takes each entry of a list as a prompt of its own, a token id too, and answers each once, whatever ``n`` says.
OpenAI's API has a list of token ids as one prompt, and the answers to prompt i at the indices from i * n on.
"""

from collections.abc import Callable
from typing import Any, Final

MOST_ANSWERS: Final = 128
"""As many as LMDeploy allows for a chat."""


def prompts_of(prompt: Any) -> list[Any]:
    """Return the prompts of a body: texts or lists of token ids. What is neither is left to the check of a prompt."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list):
        return [prompt]
    return prompt if isinstance(prompt, list) else [prompt]


def problem_of(prompts: int, answers: int, *, streamed: bool) -> str | None:
    """Return why so many ``answers`` to each prompt aren't served, None where they are."""
    if prompts * answers > MOST_ANSWERS:
        return f"{prompts} prompts with n {answers} are {prompts * answers} answers; at most {MOST_ANSWERS} are allowed"
    if streamed and answers > 1:
        return f"n {answers} with stream is not served here: leave out stream, or send {answers} requests"
    return None


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def check_request(original: Callable[[Any, Any], str]) -> Callable[[Any, Any], str]:
    """``check_request`` of completions, in the api_server, where a request comes by before it has sessions."""

    def check_request(request: Any, server_context: Any) -> str:
        refused = original(request, server_context)
        if refused:
            return refused
        prompts = prompts_of(request.prompt)
        problem = problem_of(len(prompts), request.n, streamed=bool(request.stream))
        if problem is not None:
            return problem
        if request.n > 1 or isinstance(request.prompt, list):
            request.prompt = [prompt for prompt in prompts for _ in range(request.n)]
        return ""

    return check_request


__all__ = ["MOST_ANSWERS", "check_request", "problem_of", "prompts_of"]
