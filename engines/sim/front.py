"""The way of requests to a simulated engine's steps: HTTP, template, tokens; one request after the other."""

import math
from collections import deque
from collections.abc import Iterator

from engines.sim.sequence import Phase, SimSequence
from engines.sim.timing import TimeModel


class Front:
    """The requests that have not reached the engine, each with its time of arrival; ``slow`` multiplies all times."""

    def __init__(self, time: TimeModel, slow: float) -> None:
        self._time = time
        self._slow = slow
        self._arriving: deque[tuple[float, SimSequence]] = deque()
        self._busy_s = 0.0
        """The arrival of the last request."""

    def __len__(self) -> int:
        return len(self._arriving)

    @property
    def next_s(self) -> float:
        """The next arrival; infinite where no request is on the way."""
        return self._arriving[0][0] if self._arriving else math.inf

    def enter(self, sequence: SimSequence, now_s: float) -> float:
        """Take a request and return its time of arrival; a request that arrives at once isn't kept."""
        takes_s = self._slow * self._time.before_s(sequence.request.prompt_tokens)
        if not takes_s:
            return now_s
        self._busy_s = max(self._busy_s, now_s) + takes_s
        sequence.phase = Phase.ARRIVING
        self._arriving.append((self._busy_s, sequence))
        return self._busy_s

    def arrived(self, now_s: float) -> Iterator[SimSequence]:
        """Yield the requests that have arrived by now; each waits for its prompt from here on."""
        while self._arriving and self._arriving[0][0] <= now_s:
            sequence = self._arriving.popleft()[1]
            sequence.phase = Phase.WAITING
            yield sequence

    def cancel(self, sequence: SimSequence) -> None:
        """Forget a request on the way; the work on it is done all the same."""
        self._arriving = deque(each for each in self._arriving if each[1] is not sequence)
