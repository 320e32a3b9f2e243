"""The prompts of a body of ``/v1/completions``, each with the answers that it asks for, in a bounded number."""

from typing import Any, Final

MOST_ANSWERS: Final = 128
"""As many as LMDeploy allows for a chat."""


def prompts_of(prompt: Any) -> list[Any]:
    """Return the prompts of a body: texts or lists of token ids. What is neither is left to the check of a prompt."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list):
        return [prompt]
    return prompt if isinstance(prompt, list) else [prompt]


def problem_of(prompts: int, answers: int) -> str | None:
    """Return why so many ``answers`` to each prompt aren't served, None where they are."""
    if prompts * answers > MOST_ANSWERS:
        return f"{prompts} prompts with n {answers} are {prompts * answers} answers; at most {MOST_ANSWERS} are allowed"
    return None
