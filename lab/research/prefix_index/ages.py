"""Which block leaves next: the eviction order of one engine's index, without a heap.

Every use of a prefix moves its nodes to the young end of one list, *tail first, head last*. So a parent is always
younger than its children, the oldest node is always a leaf, and evicting from the old end takes tails before heads in
O(1). Pinned nodes are not in the list at all; a pinned node's ancestors are pinned too.

Readers can't move nodes: they leave a note of the tail that they used, which the next writer follows. Notes are
bounded; of too many the oldest are lost, and with them nothing but some age.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvcontrol.core import BlockHash
from kvcontrol.core.integrity import must
from lab.research.prefix_index.node import Node
from lab.research.prefix_index.tree import PrefixTree

_MAX_NOTES = 65_536


class Ages:
    """The unpinned nodes of a tree from oldest to youngest. One writer at a time; ``notes.append`` from any thread."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._by_age: OrderedDict[BlockHash, Node] = OrderedDict()
        self.notes: deque[Node] = deque(maxlen=_MAX_NOTES)

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes, oldest first."""
        return iter(self._by_age.values())

    def __contains__(self, node: Node) -> bool:
        return node.key in self._by_age

    def oldest(self) -> Node | None:
        """Return the node to evict next; None when all are pinned."""
        return next(iter(self), None)

    def rejoin(self, node: Node) -> None:
        """Make a node the youngest, unless it is pinned."""
        if not node.pins:
            self._by_age[node.key] = node
            self._by_age.move_to_end(node.key)

    def leave(self, node: Node) -> None:
        """Take a node off the list, if it is there: it is pinned, being used or removed."""
        self._by_age.pop(node.key, None)

    def follow_notes(self) -> None:
        """Make young what readers used since the last write, each prefix once, in the order of its last use.

        O(notes + nodes used), however many notes name prefixes of each other.
        """
        if not self.notes:
            return
        used: dict[Node, None] = {}
        for _ in range(len(self.notes)):
            tail = self.notes.popleft()
            used.pop(tail, None)
            used[tail] = None
        younger: list[Node] = []  # from the youngest use back; a node's ancestors have no older use than it has
        seen: set[Node] = set()
        for tail in reversed(used):
            if tail not in self._tree:
                continue
            path: list[Node] = []
            for node in tail.upwards():
                if node in seen:
                    break
                path.append(node)
            seen.update(path)
            younger += reversed(path)
        for node in reversed(younger):
            self.rejoin(node)

    def check(self) -> None:
        """Raise ``AssertionError`` when the list lacks a node, has one too many, or a parent is too old."""
        for node in self._tree:
            must((node in self) == (node.pins == 0), "the list holds a pinned node, or lacks another")
        ages = {node: age for age, node in enumerate(self)}
        for node, age in ages.items():
            must(node in self._tree, "the list has a node that is not held")
            parent = node.parent
            must(parent is None or parent.pins > 0 or ages[parent] > age, "a parent is older than its child")
