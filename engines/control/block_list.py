"""The blocks below an engine's memory, as ``GET /kv/v1/blocks`` lists them."""

import heapq
import time
from collections.abc import Iterator

from kvcontrol.core.tier_control import BlockInfo, BlockList, BlockQuery
from kvcontrol.kv_runtime import HierarchyManager


def block_list(hierarchy: HierarchyManager, query: BlockQuery, *, unit_bytes: int) -> BlockList:
    """Return the blocks below HBM that a query names, those used last first; the engine's thread. O(blocks).

    ``unit_bytes`` is what the runtime takes for one byte.
    """
    now_s = time.monotonic()
    total = 0

    def matching() -> Iterator[tuple[float, BlockInfo]]:
        nonlocal total
        for block_id, record in hierarchy.blocks():
            info, places = hierarchy.get_block_info(block_id), hierarchy.locate(block_id)
            if info is None or (query.tier is not None and query.tier not in places):
                continue
            if query.tenant is not None and query.tenant != record.tenant:
                continue
            total += 1
            idle_s = max(0.0, now_s - info.last_access_s)
            yield (
                idle_s,
                BlockInfo(
                    hash=record.key.hex(),
                    tiers=list(places),
                    size_bytes=info.size_bytes * unit_bytes,
                    tenant=record.tenant,
                    idle_s=round(idle_s, 3),
                ),
            )

    youngest = heapq.nsmallest(query.limit, matching(), key=lambda each: each[0])
    return BlockList(total=total, blocks=[info for _, info in youngest])
