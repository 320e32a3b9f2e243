"""Metrics of the prefix index: hit ratios, match lengths, look-up times, collisions."""

import threading
from collections import Counter
from dataclasses import dataclass
from math import log2

_BUCKETS_PER_OCTAVE = 8


class LatencyHistogram:
    """Durations in buckets that grow by 2**(1/8): any quantile to within 9 %, in constant memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def observe(self, seconds: float) -> None:
        self._counts[int(log2(max(seconds, 1e-9) * 1e9) * _BUCKETS_PER_OCTAVE)] += 1

    def quantile(self, q: float) -> float:
        """Return the upper edge, in seconds, of the bucket that holds the q-quantile; 0.0 with no observations."""
        rank = q * self._counts.total()
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return float(2 ** ((bucket + 1) / _BUCKETS_PER_OCTAVE)) / 1e9
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuseReport:
    """Totals since the index was made. Rates are None before the first look-up.

    ``matched_blocks`` maps a power of two to the number of hits with fewer matched blocks than it and no fewer than
    its half (1 is for misses). ``collisions`` counts blocks whose hash was right and whose tokens were not. The last
    three are what is held now; ``held_bytes`` estimates what holding it costs the index itself.
    """

    lookups: int
    hits: int
    looked_up_blocks: int
    hit_blocks: int
    looked_up_tokens: int
    hit_tokens: int
    matched_blocks: dict[int, int]
    lookup_p50_s: float
    lookup_p99_s: float
    collisions: int
    inserted_blocks: int
    evicted_blocks: int
    invalidated_blocks: int
    entries: int
    held_blocks: int
    held_bytes: int

    @property
    def request_hit_rate(self) -> float | None:
        """Share of look-ups that matched at least one block."""
        return self.hits / self.lookups if self.lookups else None

    @property
    def block_hit_rate(self) -> float | None:
        """Share of full blocks looked up that were held."""
        return self.hit_blocks / self.looked_up_blocks if self.looked_up_blocks else None

    @property
    def token_hit_rate(self) -> float | None:
        """Share of all prompt tokens, partial blocks included, that were held."""
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else None


class PrefixReuseMetrics:
    """Counts; any thread. The lock is held for a few additions only, never while the index works."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latency = LatencyHistogram()
        self._matched: Counter[int] = Counter()
        self._lookups = self._hits = 0
        self._looked_up_blocks = self._hit_blocks = 0
        self._looked_up_tokens = self._hit_tokens = 0
        self._collisions = self._inserted = self._evicted = self._invalidated = 0

    def looked_up(self, *, blocks: int, matched_blocks: int, tokens: int, matched_tokens: int, took_s: float) -> None:
        """Count one look-up."""
        with self._lock:
            self._latency.observe(took_s)
            self._matched[1 << matched_blocks.bit_length()] += 1
            self._lookups += 1
            self._hits += matched_blocks > 0
            self._looked_up_blocks += blocks
            self._hit_blocks += matched_blocks
            self._looked_up_tokens += tokens
            self._hit_tokens += matched_tokens

    def collided(self) -> None:
        """Count one block with an equal hash and different tokens."""
        with self._lock:
            self._collisions += 1

    def inserted(self, blocks: int) -> None:
        with self._lock:
            self._inserted += blocks

    def evicted(self, blocks: int) -> None:
        with self._lock:
            self._evicted += blocks

    def invalidated(self, blocks: int) -> None:
        with self._lock:
            self._invalidated += blocks

    def report(self, *, entries: int = 0, held_blocks: int = 0, held_bytes: int = 0) -> PrefixReuseReport:
        """Return all totals, with the size of the index."""
        with self._lock:
            return PrefixReuseReport(
                lookups=self._lookups,
                hits=self._hits,
                looked_up_blocks=self._looked_up_blocks,
                hit_blocks=self._hit_blocks,
                looked_up_tokens=self._looked_up_tokens,
                hit_tokens=self._hit_tokens,
                matched_blocks=dict(self._matched),
                lookup_p50_s=self._latency.quantile(0.5),
                lookup_p99_s=self._latency.quantile(0.99),
                collisions=self._collisions,
                inserted_blocks=self._inserted,
                evicted_blocks=self._evicted,
                invalidated_blocks=self._invalidated,
                entries=entries,
                held_blocks=held_blocks,
                held_bytes=held_bytes,
            )
