"""The blocks that one engine's index holds: a flat dictionary from key to node, and the links between the nodes."""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvcontrol.core import BlockHash
from kvcontrol.core.integrity import must
from lab.research.prefix_index.node import Node


class PrefixTree:
    """All held nodes. One writer at a time; ``get`` and ``path`` also without its lock: dictionary reads only.

    A held node's parent is held. To readers a node appears after its parent and goes with or before it.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, Node] = {}
        self.get = self._nodes.get

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Yield all nodes in the order in which they were attached, so parents before children."""
        return iter(self._nodes.values())

    def __reversed__(self) -> Iterator[Node]:
        """Yield all nodes, children before parents."""
        return reversed(self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        """Tell whether this very node is held, not only one under its key."""
        return self.get(node.key) is node

    def path(self, keys: Sequence[BlockHash]) -> list[Node]:
        """Return the longest held run of keys, each node the child of the one before; O(run)."""
        get = self.get
        path: list[Node] = []
        parent: Node | None = None
        for key in keys:
            node = get(key)
            if node is None or node.parent is not parent:
                break
            path.append(node)
            parent = node
        return path

    def lowest_held(self, tail: Node | None) -> tuple[Node, ...]:
        """Return the lowest node from ``tail`` upwards that is still held, if there is any."""
        return tuple(islice((node for node in (tail.upwards() if tail else ()) if node in self), 1))

    def attach(self, key: BlockHash, parent: Node | None, tokens: bytes, block_id: int) -> Node:
        """Hold a new block below ``parent``."""
        node = Node(key, parent, tokens, block_id)
        if parent is not None:
            parent.adopt(node)
        self._nodes[key] = node
        return node

    def remove(self, top: Node) -> list[Node]:
        """Let go of a node and all below it, and return them; O(removed)."""
        top.leave()
        gone: list[Node] = []
        left = [top]
        while left:
            node = left.pop()
            left += node.children()
            del self._nodes[node.key]
            gone.append(node)
        return gone

    def check(self, width: int) -> None:
        """Raise ``AssertionError`` when links contradict each other, or tokens aren't ``width`` bytes long. O(held)."""
        with_parent = known_to_parent = 0
        for key, node in self._nodes.items():
            must(node.key == key, "a node lies under another key")
            must(len(node.tokens) == width, "a node's tokens are not one block")
            before: Node | None = None
            for child in node.children():
                must(child in self and child.parent is node, "a child has another parent")
                must(child.left is before, "siblings contradict each other")  # so none comes twice, and there's an end
                before = child
                known_to_parent += 1
            if node.parent is not None:
                must(node.parent in self, "a parent is not held")
                with_parent += 1
        must(with_parent == known_to_parent, "a parent doesn't know its child")
