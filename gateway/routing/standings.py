"""Lower bounds of each instance's cost before the prompt is known, kept between requests.

When the prompt comes, the few that hold some of it are worked out first. All others cost at least what the fastest one
would for the whole prompt, with as little to do as the least busy has; where that is more than what ties, nobody looks
at them. Otherwise those count that have changed since somebody did: what was worked out of the others holds.

    cost  = own_s + (prompt_tokens + excess / 3) * token_s      (excess: only where some have more of it than others)
    own_s = load_s - expected_tokens * token_s + reload_s

``load_s`` is less for a prompt of which a chunk at most is to be computed (``short_s``): it passes long ones.
``token_s`` is what a token costs that has to be computed: its prefill, and that again as ``work`` and as ``room``.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import ge, is_, ne
from typing import Final

from gateway.routing.base import CHUNK_TOKENS, Speeds
from gateway.routing.field import CandidateColumns, Held
from gateway.routing.scoring import reload_s
from kvcontrol.core.blocks import CacheTier

LEAST_SHARE_S: Final = 0.005
"""Without it, two equal instances of which one once began an answer a little later would not share a burst."""
MOST_EXCESS_TOKENS: Final = 8192
_TIMES: Final = 3
"""So often the prefill of a token counts: as a wait, as ``work`` and as ``room``."""
_TIE_S: Final = 0.005
_TIE_SHARE: Final = 0.05


class Standings:
    """Of one columns. ``tied`` is O(holders), or O(instances) where others may cost as little: then also those are
    worked out anew that have changed since that was so last.
    """

    __slots__ = (
        "_assumed",
        "_epoch",
        "_floor",
        "_load_s",
        "_paces",
        "_read",
        "_short_s",
        "_spread",
        "_token_s",
        "columns",
    )

    def __init__(self, columns: CandidateColumns, assumed: Speeds, spread: float) -> None:
        self.columns = columns
        self._assumed = assumed
        self._spread = spread
        self._load_s: list[float] = []
        self._short_s: list[float] = []
        self._token_s: list[float] = []
        self._epoch = -1
        self._read = 0
        self._paces: tuple[Speeds | None, ...] = ()
        self._floor = (0.0, 0.0, 0.0)

    def tied(self, prompt_tokens: int | None, holding: Mapping[int, Held]) -> dict[int, float]:
        """Return the places of those that cost least, give or take what ties, and their costs. ``holding`` are those
        that expect some of the prompt.
        """
        tokens = 0.0 if prompt_tokens is None else float(prompt_tokens)
        columns = self.columns
        is_short = prompt_tokens is not None and prompt_tokens <= CHUNK_TOKENS
        if not holding:
            self._follow()
            load_s = self._short_s if is_short else self._load_s
            return _lowest([first_s + tokens * each_s for first_s, each_s in zip(load_s, self._token_s, strict=True)])
        queued, soon, running, slots = columns.queued, columns.soon, columns.running, columns.slots
        recent, known = columns.recent, columns.speeds
        scale, most = columns.scale, MOST_EXCESS_TOKENS / _TIMES
        part = self._spread / _TIMES if _drawn(holding, len(recent)) else 0.0
        least = columns.least * scale
        costs_s: dict[int, float] = {}
        last: Speeds | None = None  # most have the same, and hold as much in the same tiers
        loaded: Mapping[CacheTier, int] | None = None
        for at, (matched, tiers, expected) in holding.items():
            speeds = known[at] or self._assumed
            if speeds is not last:
                last, each_s, base_s = speeds, _TIMES / speeds.prefill_tokens_per_s, speeds.base_s
                share_s, reloads = max(LEAST_SHARE_S, speeds.decode_load_s), speeds.reload_s_per_token
                loaded = None
            runs = running[at]
            before = queued[at] if prompt_tokens is None or prompt_tokens - expected > CHUNK_TOKENS else soon[at]
            own_s = base_s + before / _TIMES * each_s + runs * share_s
            if 0 < slots[at] <= runs:
                own_s += (runs - slots[at] + 1) * speeds.answer_s / slots[at]
            if prompt_tokens is not None:
                own_s -= expected * each_s
                if reloads and matched:
                    if tiers is not loaded:
                        loaded, again_s = tiers, reload_s(tiers, speeds)
                    own_s += again_s
            costs_s[at] = (
                own_s + (tokens + (more if (more := part * (recent[at] * scale - least)) < most else most)) * each_s
            )
        bound_s = _bound_s(min(costs_s.values()))
        if self._are_all_above(bound_s, tokens, soon if is_short else queued):
            return {at: cost_s for at, cost_s in costs_s.items() if cost_s <= bound_s}
        self._follow()
        load_s = self._short_s if is_short else self._load_s
        all_s = [
            first_s + (tokens + (more if (more := part * (past * scale - least)) < most else most)) * each_s
            for first_s, each_s, past in zip(load_s, self._token_s, recent, strict=True)
        ]
        for at, cost_s in costs_s.items():
            all_s[at] = cost_s
        return _lowest(all_s)

    def _are_all_above(self, bound_s: float, tokens: float, before: Iterable[int]) -> bool:
        """Say whether whoever holds nothing costs more than this, whatever it has to do, or as the least of all do;
        ``before`` are the tokens that are computed before the prompt at each. False may be wrong.
        """
        columns = self.columns
        paces = columns.paces or columns.find_paces()
        if paces is not self._paces:
            self._paces = paces
            self._floor = _floor([each or self._assumed for each in paces])
        base_s, each_s, share_s = self._floor
        whole_s = tokens * each_s
        return (
            base_s + whole_s > bound_s
            or base_s + min(before) / _TIMES * each_s + min(columns.running) * share_s + whole_s > bound_s
        )

    def costs_no_more(self, other: int, at: int, prompt_tokens: int | None) -> bool:
        """Whether an instance would cost no more than another one if neither had any of the prompt, give or take what
        ties: only what it has draws the prompt to that one.
        """
        self._follow()
        tokens = 0.0 if prompt_tokens is None else float(prompt_tokens)
        load_s = self._short_s if 0 < tokens <= CHUNK_TOKENS else self._load_s
        own_s, other_s = (load_s[place] + tokens * self._token_s[place] for place in (at, other))
        return other_s <= _bound_s(own_s)

    def excesses(self, places: Iterable[int]) -> list[float]:
        """Return the uncached work that these were given lately, beyond the others, as far as that counts."""
        recent, scale, spread = self.columns.recent, self.columns.scale, self._spread
        least = self.columns.least * scale
        return [min(spread * (recent[at] * scale - least), MOST_EXCESS_TOKENS) for at in places]

    def _follow(self) -> None:
        """Take in what has changed."""
        columns = self.columns
        if self._epoch != columns.epoch:
            self._work_out_all()
            self._epoch = columns.epoch
        elif self._read != len(columns.changed):
            self._work_out(set(columns.changed[self._read :]))
        self._read = len(columns.changed)

    def _work_out_all(self) -> None:
        columns, count = self.columns, len(self.columns.names)
        speeds = columns.speeds[0]
        if all(map(is_, columns.speeds, repeat(speeds))):  # as mostly: few are worked out one by one then
            first = speeds or self._assumed
            each_s, base_s = _TIMES / first.prefill_tokens_per_s, first.base_s
            share_s = max(LEAST_SHARE_S, first.decode_load_s)
            self._token_s = [each_s] * count
            self._load_s = [
                base_s + queued / _TIMES * each_s + runs * share_s
                for queued, runs in zip(columns.queued, columns.running, strict=True)
            ]
            self._short_s = self._load_s.copy()
            full = [at for at in compress(range(count), map(ge, columns.running, columns.slots)) if columns.slots[at]]
            self._work_out({*full, *compress(range(count), map(ne, columns.queued, columns.soon))})
        else:
            self._load_s, self._short_s, self._token_s = [0.0] * count, [0.0] * count, [0.0] * count
            self._work_out(range(count))

    def _work_out(self, places: Iterable[int]) -> None:
        load_s, short_s, token_s, columns = self._load_s, self._short_s, self._token_s, self.columns
        queued, soon, running, slots = columns.queued, columns.soon, columns.running, columns.slots
        known = columns.speeds
        last: Speeds | None = None  # most have the same
        for at in places:
            speeds = known[at] or self._assumed
            if speeds is not last:
                last, each_s, base_s = speeds, _TIMES / speeds.prefill_tokens_per_s, speeds.base_s
                share_s = max(LEAST_SHARE_S, speeds.decode_load_s)
            runs, most = running[at], slots[at]
            tokens = queued[at]
            before_s = soon_s = base_s + tokens / _TIMES * each_s + runs * share_s
            if soon[at] != tokens:
                soon_s = base_s + soon[at] / _TIMES * each_s + runs * share_s
            if 0 < most <= runs:
                slot_s = (runs - most + 1) * speeds.answer_s / most
                before_s += slot_s
                soon_s += slot_s
            load_s[at], short_s[at], token_s[at] = before_s, soon_s, each_s


def _floor(paces: Sequence[Speeds]) -> tuple[float, float, float]:
    """The least that anything takes at one of these speeds: to begin, a token, a running request."""
    base_s, speed, share_s = paces[0].base_s, paces[0].prefill_tokens_per_s, paces[0].decode_load_s
    for each in paces[1:]:
        base_s, speed = min(base_s, each.base_s), max(speed, each.prefill_tokens_per_s)
        share_s = min(share_s, each.decode_load_s)
    return base_s, _TIMES / speed, max(LEAST_SHARE_S, share_s)


def _drawn(holding: Mapping[int, Held], instances: int) -> bool:
    """Whether some have more of the prompt than others: what all have as much of draws it nowhere."""
    return len(holding) < instances or len({expected for _, _, expected in holding.values()}) > 1


def _bound_s(lowest_s: float) -> float:
    return lowest_s + max(_TIE_S, lowest_s * _TIE_SHARE)


def _lowest(costs_s: list[float]) -> dict[int, float]:
    bound_s = _bound_s(min(costs_s))
    return {at: cost_s for at, cost_s in enumerate(costs_s) if cost_s <= bound_s}
