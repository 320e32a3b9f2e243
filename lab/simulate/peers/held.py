"""What the requests at each instance hold there, in tokens of prompts; a ``Query`` says only how many requests run.

Routers that count blocks in use are told when a request ends; here the oldest of an instance is taken to end first.
"""

from collections import deque

from gateway.routing import Candidate
from kvcontrol.core.ids import InstanceId


class HeldPrompts:
    """The last prompts placed at each instance, as many as run there. O(1) amortised."""

    def __init__(self) -> None:
        self._prompts: dict[InstanceId, deque[int]] = {}
        self._tokens: dict[InstanceId, int] = {}

    def placed(self, instance: InstanceId, prompt_tokens: int) -> None:
        """Note that a prompt goes to an instance."""
        self._prompts.setdefault(instance, deque()).append(prompt_tokens)
        self._tokens[instance] = self._tokens.get(instance, 0) + prompt_tokens

    def tokens(self, candidate: Candidate) -> int:
        """Return the tokens of the prompts that run at a candidate."""
        prompts = self._prompts.get(candidate.instance)
        if prompts is None:
            return 0
        while len(prompts) > candidate.running:
            self._tokens[candidate.instance] -= prompts.popleft()
        return self._tokens[candidate.instance]
