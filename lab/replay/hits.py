"""What a cache of blocks would have saved: the four rates that a replay counts."""

from collections.abc import Container
from dataclasses import dataclass

from lab.traces import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """Shares between 0 and 1.

    ``block``: blocks that were there. ``prefix``: blocks that were there with all before them, the only ones that save
    work. ``token``: prompt tokens in those. ``req``: the mean over requests of that share of each one's tokens.
    """

    block: float
    prefix: float
    token: float
    req: float


class HitCounter:
    """Adds requests up; a request of no tokens counts as one of which nothing was there."""

    def __init__(self) -> None:
        self._requests = self._blocks = self._tokens = 0
        self._hit_blocks = self._prefix_blocks = self._prefix_tokens = 0
        self._shares = 0.0

    def add(self, request: Request, resident: Container[int]) -> None:
        """Count what of a request is there, before the request changes that."""
        there = [block in resident for block in request.block_ids]
        prefix_blocks = there.index(False) if False in there else len(there)
        tokens = min(request.block_tokens * prefix_blocks, request.prompt_tokens)
        self._requests += 1
        self._blocks += len(request.block_ids)
        self._tokens += request.prompt_tokens
        self._hit_blocks += sum(there)
        self._prefix_blocks += prefix_blocks
        self._prefix_tokens += tokens
        self._shares += tokens / request.prompt_tokens if request.prompt_tokens else 0.0

    def rates(self) -> HitRates:
        """Return the rates; all 0 before the first request."""
        blocks, tokens = self._blocks or 1, self._tokens or 1
        return HitRates(
            block=self._hit_blocks / blocks,
            prefix=self._prefix_blocks / blocks,
            token=self._prefix_tokens / tokens,
            req=self._shares / (self._requests or 1),
        )
