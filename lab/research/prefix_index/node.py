"""One held block, and its place in the tree of prefixes."""

from collections.abc import Iterator

from kvcontrol.core import BlockHash
from lab.research.prefix_index.entry import HeldPrefix


class Node:
    """One block of the tree. Children are a doubly linked list: a set apiece would cost more than all the rest."""

    __slots__ = ("block_id", "entry", "first_child", "key", "left", "parent", "pins", "right", "tokens")

    def __init__(self, key: BlockHash, parent: "Node | None", tokens: bytes, block_id: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.first_child: Node | None = None
        self.left: Node | None = None
        self.right: Node | None = None
        self.entry: HeldPrefix | None = None
        self.pins = 0

    def children(self) -> "Iterator[Node]":
        """Yield the nodes right below."""
        node = self.first_child
        while node is not None:
            yield node
            node = node.right

    def adopt(self, node: "Node") -> None:
        """Put a new node first among the children."""
        node.right = self.first_child
        if node.right is not None:
            node.right.left = node
        self.first_child = node

    def leave(self) -> None:
        """Take this node out of its parent's children."""
        if self.right is not None:
            self.right.left = self.left
        if self.left is not None:
            self.left.right = self.right
        elif self.parent is not None:
            self.parent.first_child = self.right

    def upwards(self) -> "Iterator[Node]":
        """Yield this node and its ancestors, tail first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent
