"""What it costs to take 200 blocks out of a full trie: LMDeploy's own eviction and ours, in turns, on equal tries.

Both sides are LMDeploy's own ``KVBlockLifecycle``, ``Node`` and ``LogicalAllocator``; ours has the hooks in place while
it works. A trie of ``leaves`` prompts of one block each is the worst that the scan can meet. What the policy's being
informed costs is timed too: a request of 256 blocks taking its references and giving them back.

    python -m lab.bench.engine.eviction [--leaves N] [--victims N] [--json]
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from engines.lmdeploy.patching import install
from lab.bench.timing import no_collection, quantile

_REQUEST_BLOCKS = 256
_NO_TOKENS = np.empty(0, dtype=np.int64)


class _FullTrie:
    """A trie of single-block prompts and one request's path, none of them in use."""

    def __init__(self, leaves: int) -> None:
        from lmdeploy.pytorch.paging.block_manager.base_block_manager import LogicalAllocator
        from lmdeploy.pytorch.paging.block_trie.node import Node
        from lmdeploy.pytorch.paging.block_trie.trie import BlockTrie

        self._node = Node
        self._allocator = LogicalAllocator(0, leaves + _REQUEST_BLOCKS)
        trie = BlockTrie(allocator=self._allocator, block_size=64, enabled=True)
        self._lifecycle = trie._kv_lifecycle  # noqa: SLF001 - it is what is measured
        self._root = trie._get_or_create_root("")  # noqa: SLF001
        self._names = count()
        for _ in range(leaves):
            self._cache(1)
        self._request = self._cache(_REQUEST_BLOCKS)

    def evict(self, blocks: int) -> float:
        """Evict, and return the seconds that took; the trie is filled up again afterwards."""
        started = time.perf_counter()
        freed = self._lifecycle.evict(blocks)
        elapsed_s = time.perf_counter() - started
        if freed != blocks:
            raise AssertionError(f"freed {freed} of {blocks} blocks")
        for _ in range(blocks):
            self._cache(1)
        return elapsed_s

    def serve(self) -> float:
        """Take and give back the references of one cached request; return the seconds that took."""
        started = time.perf_counter()
        self._allocator.update_access_time(self._request)
        self._allocator.add_ref_count(self._request, 1)
        self._allocator.free(self._request)
        return time.perf_counter() - started

    def _cache(self, blocks: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        path = self._allocator.allocate(blocks)
        node = self._root
        for block in path.tolist():
            child = self._node(next(self._names), block, _NO_TOKENS, prefix_len=node.prefix_len + 64, adapter_name="")
            child.attach_to(node)
            node = child
        self._lifecycle.commit_path_extension(node, path.tolist(), [])
        self._allocator.free(path)
        return path


def run(*, leaves: int = 100_000, victims: int = 200, rounds: int = 25) -> dict[str, float]:
    """Return metrics by name; raises ``ImportError`` where LMDeploy is not installed."""
    from engines.lmdeploy.hooks import eviction_hooks

    def hooked(work: Callable[[], Any]) -> Any:
        undo = install(eviction_hooks())
        try:
            return work()
        finally:
            undo()

    stock, ours = _FullTrie(leaves), hooked(lambda: _FullTrie(leaves))
    times: dict[str, list[float]] = {"lmdeploy_evict": [], "ours_evict": [], "lmdeploy_serve": [], "ours_serve": []}
    with no_collection():
        for _ in range(rounds):
            times["lmdeploy_serve"].append(stock.serve())
            times["ours_serve"].append(hooked(ours.serve))
            times["lmdeploy_evict"].append(stock.evict(victims))
            times["ours_evict"].append(hooked(lambda: ours.evict(victims)))
    middle = {name: quantile(sorted(each), 0.5) for name, each in times.items()}
    return {
        f"lmdeploy_evict_{victims}_of_{leaves}_p50_ms": middle["lmdeploy_evict"] * 1e3,
        f"policy_evict_{victims}_of_{leaves}_p50_ms": middle["ours_evict"] * 1e3,
        "lmdeploy_evict_over_policy_ratio": middle["lmdeploy_evict"] / middle["ours_evict"],
        f"lmdeploy_hold_release_{_REQUEST_BLOCKS}_p50_us": middle["lmdeploy_serve"] * 1e6,
        f"policy_hold_release_{_REQUEST_BLOCKS}_p50_us": middle["ours_serve"] * 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="eviction", description="Eviction from a full trie, LMDeploy's own and ours.")
    parser.add_argument("--leaves", type=int, default=100_000, help="prompts of one block that the trie holds")
    parser.add_argument("--victims", type=int, default=200, help="blocks evicted at once")
    parser.add_argument("--rounds", type=int, default=25, help="evictions timed on each side")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    if not 1 <= options.victims <= options.leaves or options.rounds < 1:
        parser.error("--victims must be between 1 and --leaves, --rounds at least 1")
    try:
        metrics = run(leaves=options.leaves, victims=options.victims, rounds=options.rounds)
    except ImportError as error:
        print(f"eviction: LMDeploy is needed here: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if options.json:
        host = {"machine": platform.machine(), "cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}
        print(json.dumps({"bench": "eviction", "host": host, "metrics": metrics}))  # noqa: T201
    else:
        for name, value in metrics.items():
            print(f"{name:40} {value:.4g}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
