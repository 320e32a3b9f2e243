"""The way of requests to a simulated engine's steps: HTTP, template, tokens; one request after the other."""

import math
from collections import deque
from collections.abc import Iterator

from engines.sim.sequence import Phase, SimSequence
from engines.sim.timing import TimeModel


class Front:
    """Who is on the way, with the time when each is through; ``slow`` multiplies all times."""

    def __init__(self, time: TimeModel, slow: float) -> None:
        self._time = time
        self._slow = slow
        self._arriving: deque[tuple[float, SimSequence]] = deque()
        self._busy_s = 0.0
        """Until when it is."""

    def __len__(self) -> int:
        return len(self._arriving)

    @property
    def next_s(self) -> float:
        """When the next request is through; infinite where none is on the way."""
        return self._arriving[0][0] if self._arriving else math.inf

    def enter(self, sequence: SimSequence, now_s: float) -> float:
        """Take a request and return when it is through; one that is through at once isn't kept."""
        takes_s = self._slow * self._time.before_s(sequence.request.prompt_tokens)
        if not takes_s:
            return now_s
        self._busy_s = max(self._busy_s, now_s) + takes_s
        sequence.phase = Phase.ARRIVING
        self._arriving.append((self._busy_s, sequence))
        return self._busy_s

    def through(self, now_s: float) -> Iterator[SimSequence]:
        """Yield those that are through by now; each waits for its prompt from here on."""
        while self._arriving and self._arriving[0][0] <= now_s:
            sequence = self._arriving.popleft()[1]
            sequence.phase = Phase.WAITING
            yield sequence

    def cancel(self, sequence: SimSequence) -> None:
        """Forget a request on the way; the work on it is done all the same."""
        self._arriving = deque(each for each in self._arriving if each[1] is not sequence)
