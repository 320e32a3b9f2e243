"""Real lifetimes in the order in which they began, with what was known then.

Answers: tokens that a request generated. Returns: seconds until a chat's next request comes, which is how long its
blocks must be kept to be of use; a chat that doesn't come back within ``NEVER_S`` counts as that. A request belongs to
the chat of the deepest of its blocks, the first (a system prompt that all share) apart, that an earlier request had.
"""

import csv
import gzip
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from lab.research.lifetimes.lifetime import MOST_PAST, LifetimeFeatures
from lab.traces import Request

AZURE: Final = "azure/AzureLLMInferenceTrace_conv.csv.gz"
"""Where the public trace of arrivals and lengths lies in a folder of traces."""
NEVER_S: Final = 600.0
_TOKEN_S: Final = 0.03
"""A token's time: an answer's length is known once it has been generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """``known_at_s`` is when it has ended, and may be learnt from."""

    began_s: float
    known_at_s: float
    features: LifetimeFeatures
    lifetime: float


@dataclass(slots=True)
class _Turn:
    request: Request
    past: tuple[float, ...]
    returned_s: float | None = None


def read_azure_answers(path: Path) -> Iterator[Lifetime]:
    """Yield the lifetimes of answers of Azure's trace: nothing but the prompt's length is known before."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            # seven digits of a second: one more than Python reads
            began_s = datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp()
            answer = max(1, int(row["GeneratedTokens"]))
            yield Lifetime(
                began_s=began_s,
                known_at_s=began_s + _TOKEN_S * answer,
                features=LifetimeFeatures(prompt_tokens=int(row["ContextTokens"])),
                lifetime=answer,
            )


def answers(requests: Iterable[Request]) -> Iterator[Lifetime]:
    """Yield the lifetimes of answers; a chat's past are the lengths of its earlier answers."""
    chats: dict[int, _Turn] = {}
    for request in requests:
        before = _before(request, chats)
        past = before.past if before else ()
        features = _features(request, before, past)
        answer = max(1, request.output_tokens or 1)
        yield Lifetime(
            began_s=request.at_s,
            known_at_s=request.at_s + _TOKEN_S * answer,
            features=features,
            lifetime=answer,
        )
        _follow(request, chats, _Turn(request, (*past, float(answer))[-MOST_PAST:]))


def returns(requests: Sequence[Request]) -> list[Lifetime]:
    """Return how long each request's chat stayed away after it; a chat's past is how long it stayed away before.

    Requests in the order in which they came. Those of the last ``NEVER_S`` are left out, whether they returned or not.
    """
    chats: dict[int, _Turn] = {}
    turns: list[tuple[_Turn, LifetimeFeatures]] = []
    for request in requests:
        before = _before(request, chats)
        past: tuple[float, ...] = ()
        if before is not None:
            if before.returned_s is None:
                before.returned_s = request.at_s
            past = (*before.past, max(0.1, request.at_s - before.request.at_s))[-MOST_PAST:]
        turn = _Turn(request, past)
        turns.append((turn, _features(request, before, past)))
        _follow(request, chats, turn)
    found = []
    last_s = max(request.at_s for request in requests)
    for turn, features in turns:
        if last_s - turn.request.at_s < NEVER_S:
            break  # the trace ends before it could be known of all
        away_s = NEVER_S if turn.returned_s is None else turn.returned_s - turn.request.at_s
        lifetime = min(NEVER_S, max(0.1, away_s))
        found.append(
            Lifetime(
                began_s=turn.request.at_s,
                known_at_s=turn.request.at_s + lifetime,
                features=features,
                lifetime=lifetime,
            )
        )
    return found


def known_in_order(lifetimes: Sequence[Lifetime]) -> Iterator[tuple[Lifetime, list[Lifetime]]]:
    """Yield each lifetime as it begins, with those that have ended since the one before it."""
    open_: list[tuple[float, int]] = []
    for place, lifetime in enumerate(lifetimes):
        ended = []
        while open_ and open_[0][0] <= lifetime.began_s:
            ended.append(lifetimes[heapq.heappop(open_)[1]])
        yield lifetime, ended
        heapq.heappush(open_, (lifetime.known_at_s, place))


def _features(request: Request, before: _Turn | None, past: tuple[float, ...]) -> LifetimeFeatures:
    new = None if before is None else max(0, request.prompt_tokens - before.request.prompt_tokens)
    return LifetimeFeatures(prompt_tokens=request.prompt_tokens, new_tokens=new, past=past)


def _before(request: Request, chats: dict[int, _Turn]) -> _Turn | None:
    for block in reversed(request.block_ids[1:]):
        turn = chats.get(block)
        if turn is not None:
            return turn
    return None


def _follow(request: Request, chats: dict[int, _Turn], turn: _Turn) -> None:
    for block in request.block_ids[1:]:
        chats[block] = turn
