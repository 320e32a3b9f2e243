"""The candidates of one prompt: load in columns, and residency of a few instances.

Of sixty-four instances four hold some of a prompt, and since the last one three have got or lost a request. A policy
that looks at columns needs no ``Candidate`` of the others; one that wants them all finds a sequence of candidates.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, overload

from gateway.routing.base import CHUNK_TOKENS, Candidate, Speeds
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId

Held = tuple[int, Mapping[CacheTier, int], int]
"""What an instance holds of a prompt: its ``matched_tokens``, ``tokens_by_tier``, ``expected_tokens``."""
NOTHING_HELD: Final[Held] = (0, MappingProxyType({}), 0)

STARVED: Final = "starved"
"""The reason of a decision for an instance that got none of the latest requests."""
PATIENCE: Final = 3
"""Requests an instance. With requests dealt at random an instance gets none of so many in one of twenty cases."""
_MOST_LOGGED: Final = 4096
make_candidate: Callable[..., Candidate] = partial(tuple.__new__, Candidate)
"""``Candidate._make`` for a tuple that is known to be of its length."""


class CandidateColumns:
    """The load of the instances that one query names, whatever its prompt: columns in their order, which only
    its owner writes.

    ``queued`` is what is computed there before a long prompt, ``soon`` what before a short one.
    ``recent`` times ``scale`` is the work that each was given lately; all of it grows old at once, by ``scale``.
    ``least`` is the least of ``recent``. ``turns`` numbers the requests that these instances got, and ``last_turns``
    has the number of each one's last, 0 for none.
    ``changed`` logs the places that changed; whoever has read it up to some place reads on there, as long as ``epoch``
    is the same. A new ``epoch`` means that anything may have changed. ``paces`` are the different ones of ``speeds``,
    and empty when those have changed since somebody looked.
    """

    __slots__ = (
        "_none_until",
        "changed",
        "epoch",
        "last_cold_requests",
        "last_turns",
        "least",
        "names",
        "paces",
        "places",
        "queued",
        "recent",
        "running",
        "scale",
        "slots",
        "soon",
        "speeds",
        "turns",
    )

    def __init__(self, names: Sequence[InstanceId]) -> None:
        count = len(names)
        self.names = tuple(names)
        self.places = {name: place for place, name in enumerate(names)}
        self.running = [0] * count
        self.queued = [0] * count
        self.soon = [0] * count
        self.slots = [0] * count
        self.recent = [0.0] * count
        self.last_cold_requests = [0] * count
        self.turns = 0
        self.last_turns = [0] * count
        self._none_until = 0
        self.speeds: list[Speeds | None] = [None] * count
        self.paces: tuple[Speeds | None, ...] = ()
        self.least = 0.0
        self.scale = 1.0
        self.changed: list[int] = []
        self.epoch = 0

    def starved(self) -> int | None:
        """Return the place of the instance that got no request for longest, where that is for more than ``PATIENCE``
        requests an instance; None where every one got some. It looks at all instances at most once in that many
        requests, since none can be starved earlier.
        """
        if self.turns <= self._none_until:
            return None
        oldest = min(self.last_turns)
        self._none_until = oldest + PATIENCE * len(self.names)
        return self.last_turns.index(oldest) if self.turns > self._none_until else None

    def find_paces(self) -> tuple[Speeds | None, ...]:
        """Set ``paces`` to the distinct objects in ``speeds`` and return them; equal instances share one object."""
        self.paces = tuple(dict(zip(map(id, self.speeds), self.speeds, strict=True)).values())
        return self.paces

    def note(self, places: Iterable[int]) -> None:
        """Log changes."""
        self.changed += places
        if len(self.changed) > _MOST_LOGGED:
            self.note_all()

    def note_all(self) -> None:
        """Say that anything may have changed."""
        self.epoch += 1
        self.changed = []

    @abstractmethod
    def seats(self) -> Sequence[Candidate]:
        """Return all as candidates that hold nothing."""

    @abstractmethod
    def candidate(self, place: int, held: Held) -> Candidate:
        """Return one as a candidate that holds this."""


class Field(Sequence[Candidate]):
    """The candidates for one prompt: columns, and by place what is expected to be held of the prompt, by those of whom
    anything is; valid until the columns change. As a sequence it is made when it is first looked at, and stays as it
    was then.
    """

    __slots__ = ("_all", "columns", "held")

    def __init__(self, columns: CandidateColumns, held: Mapping[int, Held]) -> None:
        self.columns = columns
        self.held = held
        self._all: tuple[Candidate, ...] | None = None

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> "Field":
        """Return given candidates as a field."""
        found = cls(_Given(candidates), {at: each[1:4] for at, each in enumerate(candidates) if each[3]})
        found._all = tuple(candidates)
        return found

    def at(self, place: int) -> Candidate:
        """Return one of them, without making the others."""
        if self._all is not None:
            return self._all[place]
        return self.columns.candidate(place, self.held.get(place, NOTHING_HELD))

    def starved(self, at: int) -> int | None:
        """Return the place of the instance that got none of the latest requests, where it may get the prompt instead of
        the instance at ``at``: the prompt shares only a beginning with others there, and one chunk computes it again.
        """
        other = self.columns.starved()
        if other is None:
            return None
        more_tokens = self.held.get(at, NOTHING_HELD)[2] - self.held.get(other, NOTHING_HELD)[2]
        return other if more_tokens <= CHUNK_TOKENS and self.diverges(at) else None

    def diverges(self, place: int) -> bool:
        """Whether the prompt goes on otherwise than one before it where the instance's match ends: what it shares with
        others is a beginning, such as a system prompt. Of given candidates nothing is known.
        """
        del place
        return False

    def all(self) -> tuple[Candidate, ...]:
        """Return all of them."""
        if self._all is None:
            found = list(self.columns.seats())
            for place, held in self.held.items():
                found[place] = self.columns.candidate(place, held)
            self._all = tuple(found)
        return self._all

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, place: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self.all()[place]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.columns.names)


class _Given(CandidateColumns):
    """The columns of candidates that are given as such."""

    __slots__ = ("_candidates",)

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        super().__init__([each.instance for each in candidates])
        self._candidates = candidates
        self.running = [each.running for each in candidates]
        self.queued = [each.prefill_tokens for each in candidates]
        self.soon = [each.prefill_tokens - each.passed_tokens for each in candidates]
        self.slots = [each.slots for each in candidates]
        self.recent = [each.recent_tokens for each in candidates]
        self.least = min(self.recent)
        self.last_cold_requests = [each.last_cold_request for each in candidates]
        self.last_turns = [each.last_request for each in candidates]
        self.turns = max(self.last_turns)
        self.speeds = [each.speeds for each in candidates]

    def seats(self) -> Sequence[Candidate]:
        return self._candidates

    def candidate(self, place: int, held: Held) -> Candidate:
        seat = self._candidates[place]
        return make_candidate((seat[0], *held, *seat[4:]))
