"""The order of a plan's nodes: each after those that it depends on."""

import heapq
from collections.abc import Sequence
from typing import Final

from kvcontrol.scheduler_ir.nodes import IRError, IRNode

_SHOWN: Final = 8
"""Nodes that a message names of each end of a long cycle."""


def topological_order(before: Sequence[set[int]], nodes: Sequence[IRNode]) -> tuple[int, ...]:
    """Return the places of ``nodes`` so that each comes after ``before[place]``; among free ones the first.

    Raises ``IRError`` for a cycle, with its path. O(n log n + dependencies).
    """
    after: list[list[int]] = [[] for _ in nodes]
    missing = [len(each) for each in before]
    for index, each in enumerate(before):
        for earlier in each:
            after[earlier].append(index)
    free = [index for index, count in enumerate(missing) if not count]
    order: list[int] = []
    while free:
        index = heapq.heappop(free)
        order.append(index)
        for later in after[index]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(free, later)
    if len(order) < len(nodes):
        raise IRError(f"a cycle: {_cycle(before, nodes, set(order))}")
    return tuple(order)


def _cycle(before: Sequence[set[int]], nodes: Sequence[IRNode], sorted_ones: set[int]) -> str:
    """Name one cycle's path, each node after what it waits for. O(nodes + dependencies)."""
    index = next(each for each in range(len(nodes)) if each not in sorted_ones)
    places: dict[int, int] = {}  # of the path, which goes backwards
    while index not in places:
        places[index] = len(places)
        index = min(each for each in before[index] if each not in sorted_ones)
    cycle = list(places)[places[index] :][::-1]
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[: first + 1]
    named = [nodes[each].describe() for each in cycle[:_SHOWN]]
    if len(cycle) > 2 * _SHOWN:
        named.append(f"({len(cycle) - 2 * _SHOWN} more)")
    named += [nodes[each].describe() for each in cycle[max(_SHOWN, len(cycle) - _SHOWN) :]]
    return " -> ".join(named)
