"""What each instance costs before the prompt is known, kept from one request to the next, and who may cost least.

Of sixty-four instances a few have changed since the last request: who got it, and whose answer began or ended. What was
worked out of the others holds. When the prompt comes, the few that hold some of it are worked out first. All others
cost at least what the least busy one would for the whole prompt without anything held against it; where that is more
than what ties, nobody looks at them.

    cost  = own_s + (prompt_tokens + excess / 3) * token_s      (excess: only where some have more of it than others)
    own_s = load_s - expected_tokens * token_s + reload_s

``token_s`` is what a token costs that has to be computed: its prefill, and that again as ``work`` and as ``room``.
"""

from collections.abc import Iterable, Mapping
from itertools import compress, repeat
from math import inf
from operator import ge, is_
from typing import Final

from gateway.routing.base import Speeds
from gateway.routing.field import Held, Lineup
from gateway.routing.scoring import reload_s

LEAST_SHARE_S: Final = 0.005
"""Without it, two equal instances of which one once began an answer a little later would not share a burst."""
MOST_EXCESS_TOKENS: Final = 8192
_TIMES: Final = 3
"""So often the prefill of a token counts: as a wait, as ``work`` and as ``room``."""
_TIE_S: Final = 0.005
_TIE_SHARE: Final = 0.05


class Standings:
    """Of one lineup. ``follow`` is O(1) for each instance that changed, and O(instances) in C; ``tied`` is O(holders),
    or O(instances) where others may cost as little.
    """

    __slots__ = (
        "_assumed",
        "_epoch",
        "_least_load_s",
        "_least_token_s",
        "_load_s",
        "_read",
        "_spread",
        "_token_s",
        "lineup",
    )

    def __init__(self, lineup: Lineup, assumed: Speeds, spread: float) -> None:
        self.lineup = lineup
        self._assumed = assumed
        self._spread = spread
        self._load_s: list[float] = []
        self._token_s: list[float] = []
        self._least_load_s = 0.0
        self._least_token_s = 0.0
        self._epoch = -1
        self._read = 0

    def follow(self) -> None:
        """Take in what has changed."""
        lineup = self.lineup
        if self._epoch != lineup.epoch:
            self._work_out_all()
            self._epoch = lineup.epoch
        elif self._read == len(lineup.changed):
            return
        else:
            self._work_out(lineup.changed[self._read :])
        self._read = len(lineup.changed)

    def tied(self, prompt_tokens: int | None, holding: Mapping[int, Held]) -> dict[int, float]:
        """Return the places of those that cost least, give or take what ties, and their costs. ``holding`` are those
        that expect some of the prompt.
        """
        tokens = 0.0 if prompt_tokens is None else float(prompt_tokens)
        load_s, token_s, lineup = self._load_s, self._token_s, self.lineup
        if not holding:
            return _lowest([first_s + tokens * each_s for first_s, each_s in zip(load_s, token_s, strict=True)])
        scale, most = lineup.scale, MOST_EXCESS_TOKENS / _TIMES
        part = self._spread / _TIMES if _drawn(holding, len(load_s)) else 0.0
        recent, least = lineup.recent, lineup.least * scale
        costs_s: dict[int, float] = {}
        for at, (matched, tiers, expected) in holding.items():
            own_s, each_s = load_s[at], token_s[at]
            if prompt_tokens is not None:
                own_s -= expected * each_s
                speeds = lineup.speeds[at]
                if matched and speeds is not None and speeds.reload_s_per_token:
                    own_s += reload_s(tiers, speeds)
            costs_s[at] = own_s + (tokens + min(most, part * (recent[at] * scale - least))) * each_s
        bound_s = _bound_s(min(costs_s.values()))
        if self._least_load_s + tokens * self._least_token_s > bound_s:
            return {at: cost_s for at, cost_s in costs_s.items() if cost_s <= bound_s}
        all_s = [
            first_s + (tokens + (more if (more := part * (past * scale - least)) < most else most)) * each_s
            for first_s, each_s, past in zip(load_s, token_s, recent, strict=True)
        ]
        for at, cost_s in costs_s.items():
            all_s[at] = cost_s
        return _lowest(all_s)

    def excesses(self, places: Iterable[int]) -> list[float]:
        """Return the uncached work that these were given lately, beyond the others, as far as that counts."""
        recent, scale, spread = self.lineup.recent, self.lineup.scale, self._spread
        least = self.lineup.least * scale
        return [min(spread * (recent[at] * scale - least), MOST_EXCESS_TOKENS) for at in places]

    def _work_out_all(self) -> None:
        lineup, count = self.lineup, len(self.lineup.names)
        speeds = lineup.speeds[0]
        if all(map(is_, lineup.speeds, repeat(speeds))):  # as mostly: few are worked out one by one then
            first = speeds or self._assumed
            each_s, base_s = _TIMES / first.prefill_tokens_per_s, first.base_s
            share_s = max(LEAST_SHARE_S, first.decode_load_s)
            self._token_s = [each_s] * count
            self._load_s = [
                base_s + queued / _TIMES * each_s + runs * share_s
                for queued, runs in zip(lineup.queued, lineup.running, strict=True)
            ]
            self._least_load_s, self._least_token_s = min(self._load_s), each_s
            self._work_out(
                [at for at in compress(range(count), map(ge, lineup.running, lineup.slots)) if lineup.slots[at]]
            )
        else:
            self._load_s, self._token_s = [0.0] * count, [0.0] * count
            self._least_load_s = self._least_token_s = inf
            self._work_out(range(count))

    def _work_out(self, places: Iterable[int]) -> None:
        load_s, token_s, lineup = self._load_s, self._token_s, self.lineup
        queued, running, slots, known = lineup.queued, lineup.running, lineup.slots, lineup.speeds
        last: Speeds | None = None  # most have the same
        least_load_s, least_token_s = self._least_load_s, self._least_token_s
        is_known = True
        for at in places:
            speeds = known[at] or self._assumed
            if speeds is not last:
                last, each_s, base_s = speeds, _TIMES / speeds.prefill_tokens_per_s, speeds.base_s
                share_s = max(LEAST_SHARE_S, speeds.decode_load_s)
            runs, most = running[at], slots[at]
            before_s = base_s + queued[at] / _TIMES * each_s + runs * share_s
            if 0 < most <= runs:
                before_s += (runs - most + 1) * speeds.answer_s / most
            if load_s[at] == least_load_s < before_s or token_s[at] == least_token_s < each_s:
                is_known = False
            load_s[at], token_s[at] = before_s, each_s
            least_load_s, least_token_s = min(before_s, least_load_s), min(each_s, least_token_s)
        if not is_known:  # what was the least isn't there any more
            least_load_s, least_token_s = min(load_s), min(token_s)
        self._least_load_s, self._least_token_s = least_load_s, least_token_s


def _drawn(holding: Mapping[int, Held], instances: int) -> bool:
    """Whether some have more of the prompt than others: what all have as much of draws it nowhere."""
    return len(holding) < instances or len({expected for _, _, expected in holding.values()}) > 1


def _bound_s(lowest_s: float) -> float:
    return lowest_s + max(_TIE_S, lowest_s * _TIE_SHARE)


def _lowest(costs_s: list[float]) -> dict[int, float]:
    bound_s = _bound_s(min(costs_s))
    return {at: cost_s for at, cost_s in enumerate(costs_s) if cost_s <= bound_s}


__all__ = ["LEAST_SHARE_S", "MOST_EXCESS_TOKENS", "Standings"]
