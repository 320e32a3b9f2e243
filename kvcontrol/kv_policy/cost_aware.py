"""Cost-aware: evicts the block with the lowest product of restore cost and use frequency; unused blocks age.

GreedyDual-Size-Frequency (Cherkasova 1998, after Young 1994) for blocks of one size. A block's worth is L + uses x
cost: ``cost`` is the seconds of its cheaper way back, recomputing or reloading (``BlockKey``), in units of the mean; a
bare key costs the mean. L is the worth of the last victim. So a block that isn't used stands still while L climbs
towards it, the dearer the longer. The victim is the block of least worth; among equals the one used longest ago.

With ``frequency`` 0 uses don't count: costs alone, and LRU where they are equal; with 1, the default, equal costs give
LFU with dynamic ageing. A head is worth at least what the tails told with it are: it is of no less use. Tails that are
told later may be dearer, so a head may go before them. Worths are whole numbers, 64 to a mean, in ``Buckets``: every
hook is O(1) a block, and O(log k) when one of k worths gets its first block; at most 16 uses count, at most 16 means.
"""

from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_whole
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.block_key import BlockKey
from kvcontrol.kv_policy.buckets import Buckets
from kvcontrol.kv_policy.eviction import ContentKey

_MEAN_UNITS = 64
_MOST_UNITS = 16 * _MEAN_UNITS
_MOST_USES = 16
_MEAN_WEIGHT = 0.001
"""Of the newest cost in the moving average."""


class _Entry:
    __slots__ = ("cost_s", "uses", "worth")

    def __init__(self, cost_s: float | None) -> None:
        self.cost_s = cost_s
        self.uses = 0
        self.worth = 0


class CostAwarePolicy(PathPolicy[_Entry]):
    """See the module's text."""

    name = "cost_aware"
    reason = "cost_aware: cheapest to get back, for its uses"
    tails_first = False

    def __init__(self, *, frequency: int = 1) -> None:
        check_whole("frequency", frequency, most=1)
        super().__init__()
        self._frequency = frequency
        self._lines: Buckets[BlockId, None] = Buckets()
        self._climbed = 0
        """L."""
        self._least = 0
        """What the tails of the path that is being told are worth."""
        self._mean_s: float | None = None

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``."""
        self._least = 0
        super().insert(path, keys)

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._least = 0
        super().access(path)

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        cost_s = key.loss_s if isinstance(key, BlockKey) else None
        if cost_s is not None:
            mean_s = self._mean_s
            self._mean_s = cost_s if mean_s is None else mean_s + _MEAN_WEIGHT * (cost_s - mean_s)
        entry = self._entries[block] = _Entry(cost_s)
        self._use(entry)
        self._lines.put(entry.worth, block, None)

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        held = block in self._holds
        if not held:
            self._lines.take(entry.worth, block)
        self._use(entry)
        if not held:
            self._lines.put(entry.worth, block, None)

    def _park(self, block: BlockId) -> None:
        self._lines.take(self._entries[block].worth, block)

    def _unpark(self, path: Sequence[BlockId]) -> None:
        self._least = 0
        for block in reversed(path):
            entry = self._entries[block]
            self._value(entry)
            self._lines.put(entry.worth, block, None)

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        entries = self._entries
        while (left := wanted - len(victims)) > 0 and (lowest := self._lines.take_lowest(left)):
            worth, cheapest = lowest
            self._climbed = max(self._climbed, worth)
            for block, _ in cheapest:
                del entries[block]
                victims.append(block)
        return victims

    def _use(self, entry: _Entry) -> None:
        entry.uses = min(_MOST_USES, entry.uses + 1)
        self._value(entry)

    def _value(self, entry: _Entry) -> None:
        units = _MEAN_UNITS
        if entry.cost_s is not None and self._mean_s:
            units = max(1, round(min(_MOST_UNITS, _MEAN_UNITS * entry.cost_s / self._mean_s)))
        if self._frequency:
            units *= entry.uses
        self._least = entry.worth = max(self._least, self._climbed + units)
