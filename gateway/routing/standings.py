"""What each candidate costs before the prompt is known, kept from one request to the next.

Of sixty-four candidates a few have changed since the last request: who got it, whose answer began or ended, and those
that hold some of this prompt or held some of the last one. The others are the same objects still, so what was worked
out from them holds. Found by comparing one tuple with the other, and kept in columns, so that a request costs a few
passes over plain lists of numbers.

    cost  = own_s + (prompt_tokens + excess / 2) * token_s      (excess: only where somebody has some of the prompt)
    own_s = load_s - expected_tokens * token_s + reload_s

``token_s`` is what a token costs that has to be computed: its prefill, and that again as ``work``.
"""

from collections.abc import Iterable
from itertools import compress
from operator import is_not
from typing import Final

from gateway.routing.base import Candidate, Speeds
from gateway.routing.scoring import reload_s

LEAST_SHARE_S: Final = 0.005
"""Without it, two equal instances of which one once began an answer a little later would not share a burst."""
MOST_EXCESS_TOKENS: Final = 8192


class Standings:
    """Of one list of candidates after the other. ``follow`` is O(candidates) in C, and O(1) for each that changed.

    ``expected`` has those places alone that expect any tokens.
    """

    __slots__ = ("_assumed", "_load_s", "_own_s", "_recent", "_spread", "_token_s", "candidates", "expected", "running")

    def __init__(self, assumed: Speeds, spread: float) -> None:
        self._assumed = assumed
        self._spread = spread
        self._load_s: list[float] = []
        self._own_s: list[float] = []
        self._token_s: list[float] = []
        self._recent: list[float] = []
        self.candidates: tuple[Candidate, ...] = ()
        self.running: list[int] = []
        self.expected: dict[int, int] = {}

    def follow(self, candidates: tuple[Candidate, ...]) -> None:
        """Stand for these from now on."""
        count = len(candidates)
        changed: Iterable[int] = range(count)
        if count == len(self.candidates):
            changed = compress(changed, map(is_not, candidates, self.candidates))
        else:
            self._load_s, self._own_s, self._token_s = [0.0] * count, [0.0] * count, [0.0] * count
            self._recent, self.running = [0.0] * count, [0] * count
            self.expected = {}
        self._work_out(candidates, changed)
        self.candidates = candidates

    def costs_s(self, prompt_tokens: int | None) -> list[float]:
        """Return what each costs."""
        begin_s, tokens = (self._load_s, 0.0) if prompt_tokens is None else (self._own_s, float(prompt_tokens))
        if not self.expected:
            return [first_s + tokens * each_s for first_s, each_s in zip(begin_s, self._token_s, strict=True)]
        half, least, most = self._spread / 2, min(self._recent), MOST_EXCESS_TOKENS / 2
        return [
            first_s + (tokens + (more if (more := half * (recent - least)) < most else most)) * each_s
            for first_s, each_s, recent in zip(begin_s, self._token_s, self._recent, strict=True)
        ]

    def excesses(self, places: Iterable[int]) -> list[float]:
        """Return the uncached work that these were given lately, beyond the others, as far as that counts."""
        recent, spread = self._recent, self._spread
        least = min(recent)
        return [min(spread * (recent[at] - least), MOST_EXCESS_TOKENS) for at in places]

    def _work_out(self, candidates: tuple[Candidate, ...], places: Iterable[int]) -> None:
        load_s, own_s, token_s = self._load_s, self._own_s, self._token_s
        recent_tokens, running = self._recent, self.running
        last: Speeds | None = None  # most have the same
        for at in places:
            _, matched, tiers, expected, in_flight, queued, foreign, slots, recent, _, _, known = candidates[at]
            speeds = known or self._assumed
            if speeds is not last:
                last, each_s, base_s = speeds, 2.0 / speeds.prefill_tokens_per_s, speeds.base_s
                share_s = max(LEAST_SHARE_S, speeds.decode_load_s)
            token_s[at] = each_s
            recent_tokens[at] = recent
            running[at] = runs = in_flight + foreign
            before_s = base_s + queued / 2 * each_s + runs * share_s
            if slots and runs >= slots:
                before_s += (runs - slots + 1) * speeds.answer_s / slots
            load_s[at] = before_s
            if expected:
                self.expected[at] = expected
                before_s -= expected * each_s
                if matched and speeds.reload_s_per_token:
                    before_s += reload_s(tiers, speeds)
            else:
                self.expected.pop(at, None)
            own_s[at] = before_s


__all__ = ["LEAST_SHARE_S", "MOST_EXCESS_TOKENS", "Standings"]
