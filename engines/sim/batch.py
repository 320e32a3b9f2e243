"""The sequences that decode together, and at which step the next of them ends or needs a block.

A step is the same for all of them, so each is told by the step at which it joined: nothing is done for a sequence while
it decodes. Two heaps have the steps at which something will happen to one; an entry that is no longer so (its sequence
left, joined anew, or got its block) stays until it comes up. A step costs O(1), what happens to a sequence O(log n).
"""

import heapq
from collections.abc import Iterator, Sequence

from engines.sim.sequence import Phase, SimSequence


class DecodeBatch:
    """Who decodes, since which step."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sequences: dict[int, SimSequence] = {}
        self._ending: list[tuple[int, int, SimSequence]] = []
        """By the step after which they end."""
        self._growing: list[tuple[int, int, SimSequence]] = []
        """By the step before which they need a block."""
        self._steps = 0
        self.context_tokens = 0
        """What all of them together have in KV."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> Sequence[SimSequence]:
        """All of them, in the order in which they joined."""
        return list(self._sequences.values())

    @property
    def youngest(self) -> SimSequence:
        """The one that joined last; there must be one."""
        return self._sequences[next(reversed(self._sequences))]

    def join(self, sequence: SimSequence) -> None:
        """Have a sequence, of which the first token has come, decode from the next step on."""
        sequence.phase = Phase.RUNNING
        sequence.joined_at, sequence.context = self._steps, sequence.computed
        self._sequences[sequence.number] = sequence
        self.context_tokens += sequence.computed
        heapq.heappush(self._ending, (_ends_at(sequence), sequence.number, sequence))
        self.plan_growth(sequence)

    def plan_growth(self, sequence: SimSequence) -> None:
        """Note before which step a sequence needs a block; the last token's KV is never written."""
        heapq.heappush(self._growing, (self._full_at(sequence), sequence.number, sequence))

    def leave(self, sequence: SimSequence) -> None:
        """Settle what a sequence has generated, and forget it."""
        steps = self._steps - sequence.joined_at
        del self._sequences[sequence.number]
        sequence.generated += steps
        sequence.computed = sequence.context + steps
        self.context_tokens -= sequence.computed

    def steps_undisturbed(self) -> int:
        """Return how many steps, >= 1, can be made until a sequence ends or before one needs a block; there must be a
        sequence, and none that needs one now (``needing``).
        """
        ending, growing = self._ending, self._growing
        while ending[0][2].phase is not Phase.RUNNING or ending[0][0] != _ends_at(ending[0][2]):
            heapq.heappop(ending)
        steps = ending[0][0] - self._steps
        while growing and (growing[0][2].phase is not Phase.RUNNING or growing[0][0] != self._full_at(growing[0][2])):
            heapq.heappop(growing)
        return min(steps, growing[0][0] - self._steps) if growing else steps

    def step(self, steps: int) -> None:
        """Count so many steps of everybody."""
        self._steps += steps
        self.context_tokens += steps * len(self._sequences)

    def ended(self) -> Iterator[SimSequence]:
        """Take out those that have all of their tokens, one after the other."""
        ending, now = self._ending, self._steps
        while ending and ending[0][0] <= now:
            sequence = heapq.heappop(ending)[2]
            if sequence.phase is Phase.RUNNING and _ends_at(sequence) <= now:
                self.leave(sequence)
                yield sequence

    def needing(self) -> Iterator[SimSequence]:
        """Name those that need a block before the next step, one after the other; some may have to leave for that."""
        growing = self._growing
        while growing and growing[0][0] <= self._steps:
            step, _, sequence = heapq.heappop(growing)
            if sequence.phase is Phase.RUNNING and step == self._full_at(sequence):
                yield sequence

    def _full_at(self, sequence: SimSequence) -> int:
        capacity = (sequence.attached + len(sequence.own)) * self._block_tokens
        return sequence.joined_at + capacity - sequence.context


def _ends_at(sequence: SimSequence) -> int:
    return sequence.joined_at + sequence.request.output_tokens - sequence.generated
