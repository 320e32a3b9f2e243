"""Greedy requests of random token ids to one engine of this process, each timed token by token."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_ANSWER_TOKENS: Final = 8


@dataclass(slots=True)
class Visit:
    """One request: seconds to each token, how many prompt tokens were cached, and the tokens."""

    started_s: float
    token_times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.started_s


class Visitor:
    """Sends requests to one engine of this process."""

    def __init__(self, engine: Any, *, seed: int, ids: tuple[int, int]) -> None:
        """Draw prompts from the token ids ``ids``, the first and the last one."""
        self._engine = engine
        self._ids = ids
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._sessions = 0

    def prompt(self, tokens: int) -> list[int]:
        """Return so many random token ids."""
        return [self._random.randint(*self._ids) for _ in range(tokens)]

    async def visit(self, prompt: Sequence[int], *, answer: int = _ANSWER_TOKENS) -> Visit:
        """Ask greedily for ``answer`` tokens; raises ``RuntimeError`` where there is no answer."""
        from lmdeploy.messages import GenerationConfig

        self._sessions += 1
        config = GenerationConfig(max_new_tokens=answer, ignore_eos=True, top_k=1)
        visit = Visit(started_s=time.perf_counter())
        stream = self._engine.create_instance().async_stream_infer(self._sessions, list(prompt), gen_config=config)
        async for output in stream:
            if len(output.token_ids):
                visit.token_times_s.append(time.perf_counter())
                visit.tokens += output.token_ids
            if output.req_metrics is not None:
                visit.cached = int(output.req_metrics.cached_tokens)
        if not visit.tokens:
            raise RuntimeError(f"a request of {len(prompt)} tokens got no answer: {output.status}")
        return visit
