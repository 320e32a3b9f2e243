"""Who of those that wait goes next: the contract that every strategy keeps.

A strategy *is* its queue. It is told what comes and goes, and keeps its order while that happens, so that a step which
takes a few of ten thousand doesn't look at all of them. It decides purely: it waits for nothing, and the time is an
argument of every call that depends on it, never less than at the call before.

What holds for every strategy, and is tested for every one that ships:

- *a permutation*: ``take`` until nothing is left gives every request that was added and not removed, each exactly once;
- *nobody starves*: a request that has waited ``ageing_bound_s`` goes before every request that hasn't, and those that
  have go in the order of their arrival;
- ``peek`` gives what ``take`` would, and changes nothing that the next one would show;
- a call that raises has changed nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NewType, Protocol

WaitingId = NewType("WaitingId", str)
"""A request as its queue's owner names it; not reused while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """One request that waits for its first (or next) prefill.

    ``arrived_s`` and ``deadline_s`` are on the clock of the queue's owner; ``deadline_s`` is when its first token is
    due, None where nobody said. ``priority`` is higher for what is more important, 0 for the ordinary.
    ``prefill_tokens`` are those that are not cached, ``output_tokens`` what its answer is expected to take (0: nothing
    is known). ``tenant`` is who pays for it, ``model`` which model or adapter it asks for; both may be empty. Requests
    of one ``prefix`` begin with the same block of tokens and may use the same cached ones; 0 where nobody knows.
    """

    request_id: WaitingId
    arrived_s: float
    prefill_tokens: int = 0
    output_tokens: int = 0
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    model: str = ""
    prefix: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What a strategy may know of the engine at a step: how fast it computes prompts, 0 where nothing was measured yet,
    how many requests run, and how long one step of those takes. Raises ``ValueError`` for an invalid value.
    """

    prefill_tokens_per_s: float = 0.0
    running: int = 0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.prefill_tokens_per_s < inf and 0 <= self.step_s < inf and self.running >= 0):
            raise ValueError(f"{self}: all must be finite and >= 0")


class WaitingQueue(Protocol):
    """A queue with its strategy. ``ageing_bound_s`` > 0 is how long a request can be passed by others at most."""

    @property
    def name(self) -> str: ...

    @property
    def ageing_bound_s(self) -> float: ...

    @property
    def promotions(self) -> int:
        """Requests that were started for their age: they had waited ``ageing_bound_s``."""
        ...

    @property
    def oldest_s(self) -> float | None:
        """When the one that waits longest arrived; None when nobody waits."""
        ...

    @property
    def state(self) -> str:
        """What a strategy that chooses between orders follows now; empty for the others."""
        ...

    def add(self, request: WaitingRequest) -> None:
        """Take in a request; raises ``ValueError`` when one of that id waits already."""
        ...

    def remove(self, request_id: WaitingId) -> WaitingRequest:
        """Take out a request that leaves without its turn; raises ``KeyError`` when it doesn't wait."""
        ...

    def start(self, request_id: WaitingId, now_s: float) -> WaitingRequest:
        """Take out a request that goes on now, wherever it was in the order (what was next may not have fitted); raises
        ``KeyError`` when it doesn't wait.
        """
        ...

    def take(self, most: int, now_s: float, view: EngineView = EngineView()) -> list[WaitingRequest]:
        """Start the next ``most`` requests, or all when there are fewer, in the order in which they go."""
        ...

    def peek(self, most: int, now_s: float, view: EngineView = EngineView()) -> list[WaitingRequest]:
        """Return what ``take`` would, and leave it there."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[WaitingRequest]:
        """Give all that wait, in any order."""
        ...

    def __contains__(self, request_id: object) -> bool: ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        ...


def hand_over(source: WaitingQueue, target: WaitingQueue) -> None:
    """Let ``target``, which is empty, have all that wait in ``source``, as when a strategy is swapped.

    ``source`` stays as it is, so that it can go on when one is refused (``target`` is empty again then); afterwards it
    is to be thrown away. O(n log n).
    """
    added: list[WaitingId] = []
    try:
        for request in sorted(source, key=_arrival):
            target.add(request)
            added.append(request.request_id)
    except Exception:
        for request_id in added:
            target.remove(request_id)
        raise


def _arrival(request: WaitingRequest) -> float:
    return request.arrived_s
