"""QoS: evicts from the tenant with the largest weighted use, there the lowest priority, then the oldest block.

A block weighs 1 / 2^priority on its tenant (``BlockKey`` says whose it is and how important; a bare key: nobody's, 0).
So tenants that want more than there is end up with equal weights: equal blocks where priorities are equal (Jain's index
of their weights goes to 1), twice the blocks for a priority more; who wants less keeps what it has. Max-min fairness,
by taking from the richest. A tenant that was not heard of for ``idle`` capacities of uses gives before anybody, so that
no share is kept for those who left.

Each tenant has an LRU line for each priority. Weights change with every block, but a tenant's place among tenants is
put right only when somebody asks: a heap of weights in which what is out of date is skipped at the top. Held blocks
weigh, and can't be chosen. A head that two tenants use is its inserter's and may go before the other's tail. Every hook
is O(1) a block, and choosing O(log tenants) amortised.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import MOST_CAPACITIES, check_capacity, check_number
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.block_key import HIGHEST_PRIORITY, described
from kvcontrol.kv_policy.eviction import ContentKey

_UNIT = 1 << HIGHEST_PRIORITY
"""Weight of a block of priority 0: weights are whole numbers."""
_SLACK = 64


class _Account:
    __slots__ = ("blocks", "last", "lines", "tenant", "weight")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.weight = 0
        self.blocks = 0
        """All of the tenant's, held ones too."""
        self.last = 0
        self.lines: dict[int, OrderedDict[BlockId, None]] = {}
        """By priority, those with somebody in them; at most ``HIGHEST_PRIORITY`` + 1."""


class QosPolicy(PathPolicy[tuple[_Account, int]]):
    """See the module's text; an entry is the tenant of a block and its priority."""

    name = "qos"
    reason = "qos: least important and oldest of the tenant that has most"
    tails_first = False

    def __init__(self, capacity_blocks: int, *, idle: float = 4) -> None:
        check_capacity(capacity_blocks)
        check_number("idle", idle, above=0, most=MOST_CAPACITIES)
        super().__init__()
        self._idle = max(1, int(idle * capacity_blocks))
        self._now = 0
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """The one heard of longest ago first."""
        self._richest: list[tuple[int, str]] = []
        self._changed: set[str] = set()

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        labels = described(key)
        account = self._accounts.get(labels.tenant)
        if account is None:
            account = self._accounts[labels.tenant] = _Account(labels.tenant)
        self._entries[block] = (account, labels.priority)
        account.blocks += 1
        account.weight += _UNIT >> labels.priority
        self._join(block, account, labels.priority)
        self._hear_of(account)

    def _touch(self, block: BlockId) -> None:
        account, priority = self._entries[block]
        if block not in self._holds:
            account.lines[priority].move_to_end(block)
        self._hear_of(account)

    def _park(self, block: BlockId) -> None:
        account, priority = self._entries[block]
        line = account.lines[priority]
        del line[block]
        if not line:
            del account.lines[priority]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            account, priority = self._entries[block]
            self._join(block, account, priority)
            self._hear_of(account)
            self._changed.add(account.tenant)  # all of its blocks may have been held when it was skipped

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        self._charge(block)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        accounts = self._accounts
        while accounts and len(victims) < wanted:
            first = next(iter(accounts.values()))  # the one heard of longest ago
            account: _Account | None = first
            rival = None
            if len(accounts) > 1 and not (first.lines and self._now - first.last > self._idle):
                account = self._heaviest()
                if account is not None and len(victims) + 1 < wanted:
                    rival = self._rival()
            if account is None or not account.lines:
                break
            self._give(account, wanted - len(victims), rival, victims)
        return victims

    def _give(self, account: _Account, most: int, rival: tuple[int, str] | None, victims: list[BlockId]) -> None:
        """Take blocks of a tenant that gives: one at least, and others as long as it weighs more than its rival."""
        lines, entries, tenant = account.lines, self._entries, account.tenant
        weight, first = account.weight, len(victims)
        while most and lines:
            priority = min(lines)
            line, unit = lines[priority], _UNIT >> priority
            while most and line:
                block, _ = line.popitem(OLDEST)
                del entries[block]
                victims.append(block)
                weight -= unit
                most -= 1
                if rival is not None and (-weight, tenant) > rival:
                    most = 0
            if not line:
                del lines[priority]
        account.weight = weight
        account.blocks -= len(victims) - first
        if account.blocks:
            self._changed.add(tenant)
        else:
            del self._accounts[tenant]

    def _heaviest(self) -> _Account | None:
        richest, accounts = self._richest, self._accounts
        for tenant in self._changed:
            account = accounts.get(tenant)
            if account is not None:
                heappush(richest, (-account.weight, tenant))
        self._changed.clear()
        if len(richest) > 2 * len(accounts) + _SLACK:
            self._richest = richest = [(-account.weight, account.tenant) for account in accounts.values()]
            heapify(richest)
        return self._top()

    def _rival(self) -> tuple[int, str] | None:
        """Return the second-heaviest tenant, which is computed again after each eviction."""
        heappop(self._richest)
        return self._richest[0] if self._top() else None

    def _top(self) -> _Account | None:
        richest, accounts = self._richest, self._accounts
        while richest:
            weight, tenant = richest[0]
            account = accounts.get(tenant)
            if account is not None and account.weight == -weight and account.lines:
                return account
            heappop(richest)
        return None

    def _join(self, block: BlockId, account: _Account, priority: int) -> None:
        line = account.lines.get(priority)
        if line is None:
            line = account.lines[priority] = OrderedDict()
        line[block] = None

    def _charge(self, block: BlockId) -> None:
        """Take a block off its tenant's account."""
        account, priority = self._entries[block]
        account.blocks -= 1
        account.weight -= _UNIT >> priority
        if account.blocks:
            self._changed.add(account.tenant)
        else:
            del self._accounts[account.tenant]

    def _hear_of(self, account: _Account) -> None:
        self._now += 1
        account.last = self._now
        self._accounts.move_to_end(account.tenant)
        self._changed.add(account.tenant)
