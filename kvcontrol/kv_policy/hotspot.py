"""Which prefixes follow which, and which of them a request will come for soon: plans for prefetching.

Prompts grow: a chat's next prompt is its last one and more; many begin alike. Their *lineage* is kept as runs of blocks
that were always used together, each with the runs that followed on it, how often each was used, and when last (a radix
tree over content keys; a run is split where a prompt leaves it in the middle). How long runs go without a use is learnt
from all of them, by how long they went without one the last time (``ReuseTable``). So for any run and time there is a
probability that it is used within the next seconds, and ``plan`` names those runs, likeliest first, whose blocks are
not where they should be, head before tail, as far as a budget goes.

Everything is bounded: at most ``max_blocks`` keys (the run used longest ago goes first, which is a leaf: whoever is
used is told after its tails; of a longer prompt its beginning is kept, which is what others share), and a plan looks at
``_SCAN`` runs at a time, all in turn. O(runs of the path) a request, with the keys of a new run once, and their hashes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcontrol.core.integrity import must
from kvcontrol.kv_policy.allowed import check_keys, check_number, check_share, check_whole
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.reuse_table import ReuseTable

_TICKS_PER_S: Final = 10
_MOST_S: Final = 1e12
_WINDOW: Final = 1 << 14
_SCAN: Final = 512
_CLASSES: Final = 16
_WORK_EVERY: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Blocks of one run that should be brought up, head before tail, and how likely it is used within the horizon."""

    keys: tuple[ContentKey, ...]
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPlan:
    """The blocks to prefetch, likeliest first, and the reason."""

    prefetches: tuple[Prefetch, ...]
    reason: str

    @property
    def keys(self) -> tuple[ContentKey, ...]:
        """All blocks, each once."""
        return tuple([key for each in self.prefetches for key in each.keys])


class _Run:
    __slots__ = ("followers", "gap", "keys", "last", "parent", "uses")

    def __init__(self, keys: list[ContentKey], parent: "_Run | None", now: int) -> None:
        self.keys = keys
        self.parent = parent
        self.uses = 1
        self.last = now
        self.gap: int | None = None
        """Ticks between its last two uses; None before there were two."""
        self.followers: dict[ContentKey, _Run] = {}
        """By their first keys."""

    @property
    def klass(self) -> int:
        """Class of a run by the time since its last return; runs that never returned are a class of their own."""
        return 0 if self.gap is None else min(_CLASSES - 1, 1 + self.gap.bit_length())


class HotspotLineage:
    """See the module's text. Not thread-safe."""

    def __init__(self, *, max_blocks: int = 1 << 18, horizon_s: float = 30.0) -> None:
        check_whole("max_blocks", max_blocks, least=1)
        check_number("horizon_s", horizon_s, above=0, most=_MOST_S)
        self.blocks = 0
        """Keys that are kept."""
        self._max_blocks = max_blocks
        self._horizon = max(1, int(horizon_s * _TICKS_PER_S))
        self._first: dict[ContentKey, _Run] = {}
        self._line: OrderedDict[int, _Run] = OrderedDict()
        """Runs by identity, the one used longest ago first; no run before its followers."""
        self._table = ReuseTable(_CLASSES, patience=self._horizon, window=_WINDOW, work_every=_WORK_EVERY)
        self._to_scan: list[_Run] = []
        self._now = 0
        """Of the last request, in ticks."""

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._line)

    def observe(self, path: Sequence[ContentKey], now_s: float) -> None:
        """Follow a request's prompt: its keys in order, chained as hashes are. A time before the last one is that.

        Only the first ``max_blocks`` of a longer prompt count. ``PolicyError`` for an invalid value.
        """
        _check_time(now_s)
        if len(path) > self._max_blocks:
            path = path[: self._max_blocks]
        check_keys(path)
        now = self._now = max(self._now, int(now_s * _TICKS_PER_S))
        runs: list[_Run] = []
        place = 0
        parent: _Run | None = None
        while place < len(path):
            siblings = self._first if parent is None else parent.followers
            run = siblings.get(path[place])
            if run is None:
                parent = self._begin(list(path[place:]), parent, now)
                runs.append(parent)
                break
            shared = self._shared(run, path, place)
            if shared < len(run.keys):
                self._split(run, shared, siblings)
            self._table.used(run.klass, run.last, now)
            run.uses += 1
            run.gap, run.last = now - run.last, now
            self._table.begun(run.klass, now)
            runs.append(run)
            place += shared
            parent = run
        for run in reversed(runs):
            self._line.move_to_end(id(run))
        while self.blocks > self._max_blocks:
            self._forget(now)

    def followers(self, path: Sequence[ContentKey]) -> list[tuple[ContentKey, float]]:
        """Return the runs that followed a prompt ending in a run: first keys, and each one's share of the uses."""
        check_keys(path)
        place, run, siblings = 0, None, self._first
        while place < len(path):
            run = siblings.get(path[place])
            if run is None or self._shared(run, path, place) < len(run.keys):
                return []
            place += len(run.keys)
            siblings = run.followers
        uses = sum(each.uses for each in siblings.values())
        ranked = sorted(siblings.items(), key=lambda each: -each[1].uses)
        return [(key, each.uses / uses) for key, each in ranked]

    def plan(
        self,
        now_s: float,
        *,
        budget_blocks: int,
        least_probability: float,
        wanted: Callable[[ContentKey], bool],
    ) -> PrefetchPlan:
        """Return the blocks that a request will probably use within the horizon; ``wanted`` selects the missing ones.

        ``wanted`` is asked of at most a few keys a block of the budget. Nothing changes but whose turn it is.
        """
        _check_time(now_s)
        check_whole("budget_blocks", budget_blocks)
        check_share("least_probability", least_probability)
        likely = self._likely(int(now_s * _TICKS_PER_S), least_probability)
        prefetches: list[Prefetch] = []
        left = budget_blocks
        planned: set[int] = set()
        for probability, run in likely:
            if left <= 0:
                break
            keys: list[ContentKey] = []
            for each in _lineage(run):
                if id(each) in planned:
                    continue
                planned.add(id(each))
                keys += [key for key in each.keys if wanted(key)]
            if keys:
                prefetches.append(Prefetch(keys=tuple(keys[:left]), probability=probability))
                left -= len(keys)
        reason = f"{len(likely)} runs are used with a probability of {least_probability:g} or more within the horizon"
        return PrefetchPlan(prefetches=tuple(prefetches), reason=reason)

    def _likely(self, now: int, least: float) -> list[tuple[float, _Run]]:
        """Return those of the next runs in turn that are probably used, likeliest first."""
        likely: list[tuple[float, _Run]] = []
        if not self._to_scan:
            self._to_scan = list(self._line.values())
        for _ in range(min(_SCAN, len(self._to_scan))):
            run = self._to_scan.pop()
            if id(run) in self._line:
                probability = self._table.probability(run.klass, now - run.last, self._horizon)
                if probability >= least:
                    likely.append((probability, run))
        return sorted(likely, key=lambda each: -each[0])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when runs, their order and their number contradict each other. O(blocks)."""
        order = {identity: place for place, identity in enumerate(self._line)}
        found, blocks = 0, 0
        waiting = [(run, None) for run in self._first.values()]
        more: list[tuple[_Run, _Run | None]] = list(waiting)
        while more:
            run, parent = more.pop()
            found += 1
            blocks += len(run.keys)
            must(run.parent is parent, "a run has another parent")
            must(id(run) in order, "a run has no place in the line")
            must(bool(run.keys), "a run is empty")
            for first, follower in run.followers.items():
                must(follower.keys[0] == first, "a follower stands under another key")
                must(order[id(follower)] < order[id(run)], "a run is older than its follower")
                more.append((follower, run))
        must(found == len(self._line), f"{found} runs are reachable of {len(self._line)}")
        must(blocks == self.blocks, f"{blocks} blocks are reachable of {self.blocks}")

    def _shared(self, run: _Run, path: Sequence[ContentKey], place: int) -> int:
        """Return how many of a run's keys a path has from ``place`` on; one look where it has all: keys are chained."""
        keys = run.keys
        end = place + len(keys) - 1
        if end < len(path) and path[end] == keys[-1]:
            return len(keys)
        low, high = 1, min(len(keys), len(path) - place)
        while low < high:  # the first is shared
            middle = (low + high + 1) // 2
            if path[place + middle - 1] == keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _begin(self, keys: list[ContentKey], parent: _Run | None, now: int) -> _Run:
        run = _Run(keys, parent, now)
        (self._first if parent is None else parent.followers)[keys[0]] = run
        self._line[id(run)] = run
        self.blocks += len(keys)
        self._table.begun(run.klass, now)
        return run

    def _split(self, run: _Run, shared: int, siblings: dict[ContentKey, _Run]) -> None:
        """Part a run: ``run`` keeps its first ``shared`` keys, a new one follows on it with the rest."""
        tail = _Run(run.keys[shared:], run, run.last)
        tail.uses, tail.gap = run.uses, run.gap
        tail.followers = run.followers
        for follower in tail.followers.values():
            follower.parent = tail
        run.keys = run.keys[:shared]
        run.followers = {tail.keys[0]: tail}
        siblings[run.keys[0]] = run
        self._line[id(tail)] = tail
        for each in (tail, *_lineage(run)[::-1]):  # a head is told after its tails
            self._line.move_to_end(id(each))
        self._table.begun(tail.klass, tail.last)

    def _forget(self, now: int) -> None:
        _, run = self._line.popitem(last=False)
        must(not run.followers, "a run with followers is the oldest")
        del (self._first if run.parent is None else run.parent.followers)[run.keys[0]]
        self.blocks -= len(run.keys)
        self._table.ended(run.klass, run.last, now)


def _check_time(now_s: float) -> None:
    check_number("now_s", now_s, least=-_MOST_S, most=_MOST_S)


def _lineage(run: _Run) -> list[_Run]:
    """Return a run with all before it, the first of its prompt first."""
    line: list[_Run] = []
    each: _Run | None = run
    while each is not None:
        line.append(each)
        each = each.parent
    return line[::-1]
