"""A trace as requests to a fleet: several copies of it side by side, each of another tenant's prompts.

Blocks are as large as the trace's. Their names are ``core.hashing``'s, with a block's id in the trace in the place of
its tokens: equal prefixes of one copy have equal names, and two copies share nothing.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES, chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from lab.simulate.limits import MOST_REQUESTS
from lab.traces import Request

_ID_TOKENS = 2
"""An id takes the place of a block of two tokens."""


class Arrival(NamedTuple):
    """One request as it comes: the names of its prompt's full blocks, and how long prompt and answer are."""

    at_s: float
    copy: int
    number: int
    keys: Sequence[BlockHash]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``copies`` of ``requests``, which come ``speed`` times as fast, the copies spread over ``spread_s``.

    Where the trace doesn't say how long an answer is it has ``output_tokens``. ``left_out`` counts the requests of
    the trace that are not among them because no engine can take them.
    """

    requests: Sequence[Request]
    copies: int = 1
    speed: float = 1.0
    spread_s: float = 60.0
    output_tokens: int = 128
    left_out: int = 0

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a workload of no requests; there must be at least one")
        if self.copies < 1 or not self.speed > 0 or self.spread_s < 0 or self.output_tokens < 1:
            raise ValueError(
                f"{self.copies} copies at {self.speed} times the speed over {self.spread_s} s with answers of "
                f"{self.output_tokens}; copies, speed and answers must be > 0, the spread >= 0"
            )
        if self.size > MOST_REQUESTS:
            most = MOST_REQUESTS // len(self.requests)
            raise ValueError(
                f"{self.copies:,} copies of {len(self.requests):,} requests are {self.size:,}; at most "
                f"{MOST_REQUESTS:,} are simulated: use --copies of at most {max(1, most):,}, "
                "or fewer of the trace's requests"
            )
        sizes = {each.block_tokens for each in self.requests}
        if len(sizes) > 1:
            raise ValueError(f"a workload of blocks of {sorted(sizes)} tokens; they must be of one size")

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has."""
        return self.requests[0].block_tokens

    @property
    def size(self) -> int:
        """How many requests there are."""
        return len(self.requests) * self.copies

    @property
    def lasts_s(self) -> float:
        """From the first request of one copy to its last."""
        return (max(each.at_s for each in self.requests) - min(each.at_s for each in self.requests)) / self.speed

    @property
    def spans_s(self) -> float:
        """From the first request of all copies to the last."""
        return self.lasts_s + self.spread_s * (self.copies - 1) / self.copies

    def arrivals(self, identity: CacheIdentity) -> Iterator[Arrival]:
        """Yield all requests in the order in which they come."""
        return heapq.merge(*(self._copy(copy, identity) for copy in range(self.copies)))

    def ceiling_tokens(self) -> tuple[int, int]:
        """Return all prompt tokens, and those of them that one cache with room for everything would have had."""
        ordered = sorted(range(len(self.requests)), key=lambda number: self.requests[number].at_s)
        prompt, found = self.ceiling_of((0, number) for number in ordered)
        return prompt * self.copies, found * self.copies

    def ceiling_of(self, sent: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the same of some requests in the order in which they were sent, each by its copy and number."""
        seen: set[tuple[int, int]] = set()
        prompt = found = 0
        for copy, number in sent:
            each = self.requests[number]
            size = each.block_tokens
            limit = max(0, each.prompt_tokens - 1) // size  # the last token is computed always
            ids = [(copy, block) for block in each.block_ids[: each.prompt_tokens // size]]
            prompt += each.prompt_tokens
            found += size * min(limit, next((place for place, block in enumerate(ids) if block not in seen), len(ids)))
            seen.update(ids)
        return prompt, found

    def _copy(self, copy: int, identity: CacheIdentity) -> Iterator[Arrival]:
        root = root_hash(identity, salt=f"copy-{copy}")
        shift_s = copy * self.spread_s / self.copies
        ordered = sorted(range(len(self.requests)), key=lambda place: self.requests[place].at_s)
        first_s = self.requests[ordered[0]].at_s
        for number in ordered:
            each = self.requests[number]
            packed = _packed(each.block_ids[: each.prompt_tokens // each.block_tokens])
            yield Arrival(
                at_s=shift_s + (each.at_s - first_s) / self.speed,
                copy=copy,
                number=number,
                keys=chain_hashes(root, packed, _ID_TOKENS),
                prompt_tokens=max(1, each.prompt_tokens),
                output_tokens=max(1, self.output_tokens if each.output_tokens is None else each.output_tokens),
            )


def _packed(ids: "array[int]") -> bytes:
    """Ids as 64 bits each, two tokens' worth; ids of a trace are signed 64-bit and >= 0."""
    if ids.itemsize == _ID_TOKENS * TOKEN_BYTES:
        return ids.tobytes()
    return token_bytes([part for each in ids for part in (each & 0xFFFFFFFF, each >> 32)])
