"""Workloads of prompts that try to lead a cache astray: habits that change, floods, loops, prompts larger than it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from lab.traces import Request

BLOCK_TOKENS = 64


@dataclass
class Workload:
    """Makes chained prompts for a cache of ``room`` blocks; the same for the same ``rng``."""

    rng: Random
    room: int
    made: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    popular: list[list[int]] = field(default_factory=list)

    def requests(self, count: int) -> list[Request]:
        """Return so many prompts, in a new habit every now and then."""
        found: list[Request] = []
        habits = list(HABITS.values())
        habit = self.rng.choice(habits)
        for number in range(count):
            if number % max(1, count // 5) == 0:
                habit = self.rng.choice(habits)
                self.popular = [self._new(max(1, self.room // 10)) for _ in range(20)]
            found.append(self.request(habit(self)))
        return found

    def request(self, ids: list[int]) -> Request:
        """Return a prompt of these blocks, the last of them partial."""
        self.prompts.append(ids)
        tokens = len(ids) * BLOCK_TOKENS - self.rng.randrange(BLOCK_TOKENS)
        return Request(block_ids=array("q", ids), block_tokens=BLOCK_TOKENS, prompt_tokens=tokens, at_s=self.made)

    def scan(self) -> list[int]:
        """Never to come again."""
        return self._new(self.room // 3)

    def loop(self) -> list[int]:
        """Round after round over a little more than there is room for."""
        return self.popular[len(self.prompts) % min(len(self.popular), 12)]

    def few(self) -> list[int]:
        """Some prompts much more often than others, with new ones between."""
        place = min(19, int(self.rng.expovariate(0.3)))
        return self.popular[place] if self._chance(0.6) else self._new(self.room // 2)

    def short(self) -> list[int]:
        """Mostly prompts of a part of a block, some of them again, beside long ones."""
        if self._chance(0.7):
            return [self.rng.randrange(-30, 0)] if self._chance(0.6) else self._new(1)
        return self._new(self.room // 2) if self._chance(0.5) else self.rng.choice(self.popular)

    def chats(self) -> list[int]:
        """Any of the latest prompts goes on, or a new one begins."""
        return self._go_on(40, self.room // 10)

    def agents(self) -> list[int]:
        """One or two sessions that grow beyond the cache, and are cut back now and then."""
        return self._go_on(2, self.room // 3)

    def giants(self) -> list[int]:
        """Prompts about as long as the cache, or twice."""
        return self._new(2 * self.room) if self._chance(0.5) else self._go_on(3, self.room)

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _go_on(self, latest: int, blocks: int) -> list[int]:
        if not self.prompts or self._chance(0.2):
            return self._new(blocks)
        before = self.rng.choice(self.prompts[-latest:])
        if len(before) > 3 * self.room or self._chance(0.1):
            before = before[: self.rng.randrange(len(before) + 1)]
        return before + self._new(blocks)

    def _new(self, most: int) -> list[int]:
        blocks = self.rng.randint(1, max(1, most))
        self.made += blocks
        return list(range(self.made - blocks, self.made))


HABITS: dict[str, Callable[[Workload], list[int]]] = {
    "scan": Workload.scan,
    "loop": Workload.loop,
    "few": Workload.few,
    "short": Workload.short,
    "chats": Workload.chats,
    "agents": Workload.agents,
    "giants": Workload.giants,
}
