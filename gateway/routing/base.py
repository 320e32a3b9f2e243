"""Input and output of a routing policy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId

CHUNK_TOKENS: Final = 8192
"""So much of a prompt LMDeploy computes at most before short prompts that came later get a turn:
``max_prefill_token_num`` where nobody says another.
"""

_NOWHERE: Final[Mapping[CacheTier, int]] = MappingProxyType({})
_NO_COSTS: Final[Mapping[InstanceId, Mapping[str, float]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast an instance is, as far as is known: measured where it was, assumed otherwise.

    ``base_s`` is what every request waits for its first token; ``decode_load_s`` what each running one adds;
    ``reload_s_per_token`` the time to bring a cached token from a tier below HBM; ``answer_s`` how long a request runs.
    """

    prefill_tokens_per_s: float
    decode_load_s: float
    base_s: float = 0.0
    reload_s_per_token: Mapping[CacheTier, float] = field(default_factory=dict)
    answer_s: float = 0.0


class Candidate(NamedTuple):
    """A usable instance as a policy sees it.

    ``matched_tokens`` of the prompt are known to lie in its cache, ``tokens_by_tier`` says how many in which tier.
    ``expected_tokens`` >= ``matched_tokens`` adds what was just sent there and will be cached shortly. ``in_flight``
    and ``prefill_tokens`` are this gateway's own requests there, ``foreign_requests`` those of others; ``slots`` is how
    many it runs at once, 0 when it doesn't say. ``recent_tokens`` is the uncached work it was given lately.
    ``passed_tokens`` are those of ``prefill_tokens`` that a prompt of ``CHUNK_TOKENS`` or less needn't wait for.
    ``last_request`` and ``last_cold_request`` order the candidates by when they last got any, or an unmatched, request
    (0: never). ``speeds`` is None where nothing is known: the policy's own assumptions hold.

    A tuple, as many are made for each request: a frozen dataclass takes four times as long to make.
    """

    instance: InstanceId
    matched_tokens: int = 0
    tokens_by_tier: Mapping[CacheTier, int] = _NOWHERE
    expected_tokens: int = 0
    in_flight: int = 0
    prefill_tokens: int = 0
    foreign_requests: int = 0
    slots: int = 0
    recent_tokens: float = 0.0
    last_request: int = 0
    last_cold_request: int = 0
    speeds: Speeds | None = None
    passed_tokens: int = 0

    @property
    def matched_tiers(self) -> tuple[CacheTier, ...]:
        return tuple(tier for tier, tokens in self.tokens_by_tier.items() if tokens)

    @property
    def running(self) -> int:
        """Requests there, ours and others'."""
        return self.in_flight + self.foreign_requests


class Query:
    """One request to place. ``prompt_tokens`` is None when the prompt has no fingerprint, and ``gap`` then says why.

    ``key`` is what requests that belong together have in common, None when nothing is known of that; it may be given as
    what makes it, as few policies ask for it. ``candidates`` holds at least one; of a gateway's own requests it is a
    ``Field``.
    """

    __slots__ = ("_key", "candidates", "gap", "prompt_tokens")

    def __init__(
        self,
        *,
        prompt_tokens: int | None,
        gap: str | None,
        candidates: Sequence[Candidate],
        key: bytes | Callable[[], bytes] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.gap = gap
        self.candidates = candidates
        self._key = key

    @property
    def key(self) -> bytes | None:
        if callable(self._key):
            self._key = self._key()
        return self._key


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What is assumed before anything has been measured, and how much evenness is worth.

    ``spread`` is the share of the uncached work that an instance was given lately, beyond what the least busy one was,
    that counts against it: prefixes that many prompts share are so copied to where there is room.
    """

    prefill_tokens_per_s: float
    decode_load_s: float
    spread: float = 0.1

    def speeds(self) -> Speeds:
        return Speeds(prefill_tokens_per_s=self.prefill_tokens_per_s, decode_load_s=self.decode_load_s)


class Decision(NamedTuple):
    """Where a request goes. ``basis`` is what decided (``prefix``, ``load``, ``round_robin``, ``hash``), ``reason`` a
    word from a small fixed set that says why, ``cost_s`` the candidates' named costs in seconds where the policy has
    any; they are worked out for whom they are asked for. ``wait_s`` is the predicted time to the first token, None
    where the policy doesn't count in seconds or the prompt isn't known.

    A tuple, as one is made for each request.
    """

    candidate: Candidate
    basis: str
    reason: str
    cost_s: Mapping[InstanceId, Mapping[str, float]] = _NO_COSTS
    wait_s: float | None = None


class Costs(Mapping[InstanceId, Mapping[str, float]]):
    """What each candidate costs in named terms, worked out when somebody looks: a decision needs their sums alone."""

    __slots__ = ("_candidates", "_terms")

    def __init__(self, candidates: Sequence[Candidate], terms: Callable[[Candidate], Mapping[str, float]]) -> None:
        self._candidates = candidates
        self._terms = terms

    def __getitem__(self, instance: InstanceId) -> Mapping[str, float]:
        for each in self._candidates:
            if each.instance == instance:
                return self._terms(each)
        raise KeyError(instance)

    def __iter__(self) -> Iterator[InstanceId]:
        return (each.instance for each in self._candidates)

    def __len__(self) -> int:
        return len(self._candidates)


class RoutingPolicy(Protocol):
    """A pure function of a query: the same query gives the same decision, and nothing is remembered."""

    name: ClassVar[str]

    def choose(self, query: Query) -> Decision:
        """Return one of the candidates, with the reason."""
        ...
