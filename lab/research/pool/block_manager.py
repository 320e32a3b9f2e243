"""Which blocks are whose: a table for each request, blocks shared between requests, and what becomes of them.

             allocate                     free
    (none) ────────────▶ running ───────────────────▶ (none)
                 append ↺   │  ▲                        ▲
                    preempt │  │ resume                 │ free
                            ▼  │                        │
                         preempted ─────────────────────┘

A request of ``n`` tokens has ``ceil(n / block_tokens)`` blocks; all but the last are full. A full block is never
written again, so any number of requests may share it: a prefix that was found in the cache, or the whole past of a
fork. The last, unfilled block of a fork is shared too, until one of its owners appends: that one gets a copy
(copy-on-write). When a request ends, its full blocks stay cached, unless their KV was never written; the unfilled one
is freed.

The manager moves no bytes. It says what to copy, and the caller copies before it writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.errors import AllocationError, RequestError
from kvcontrol.kv_runtime.refusal import NoSpace
from lab.research.pool.pool import AllocationResult, KVPool, Mark
from lab.research.pool.space import BlockSpec
from lab.research.pool.usage import Fragmentation, Utilization


class RequestState(StrEnum):
    """What the manager keeps for a request."""

    RUNNING = "running"
    PREEMPTED = "preempted"


class BlockCopy(NamedTuple):
    """The bytes of ``src`` are to be in ``dst`` before the next write to ``dst``."""

    src: BlockId
    dst: BlockId


class Extension(NamedTuple):
    """What appending needed: blocks that joined the end of the table, and what to copy into replaced ones first."""

    block_ids: tuple[BlockId, ...]
    copies: tuple[BlockCopy, ...]


IN_PLACE = Extension(block_ids=(), copies=())
"""The last block has room: nothing is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A request's whole table again; the KV of its first ``kept_tokens`` is still there, the rest is to be computed."""

    block_ids: tuple[BlockId, ...]
    kept_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """A request as it is now. A preempted one has no blocks, and ``tokens`` that a resumption makes room for."""

    request_id: str
    state: RequestState
    tokens: int
    block_ids: tuple[BlockId, ...]


class _Request:
    """``blocks`` is the table while running. While preempted, the blocks that might be found again, with ``marks``."""

    __slots__ = ("blocks", "marks", "reused", "state", "tokens")

    def __init__(self, blocks: list[BlockId], tokens: int, reused: int) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.reused = reused
        """How many of the first blocks came with their KV written."""
        self.state = RequestState.RUNNING
        self.marks: list[Mark] = []


class BlockManager:
    """Tables of the requests whose blocks are of one kind, in one pool. Not thread-safe.

    Misuse raises ``RequestError`` (the request) or ``AllocationError`` (the blocks) and changes nothing; lack of room
    is a ``NoSpace`` and changes nothing either, but for what the pool evicted.
    """

    def __init__(self, pool: KVPool, *, spec: BlockSpec | None = None) -> None:
        self.pool = pool
        self.spec = pool.space.specs[0] if spec is None else spec
        pool.space.order(self.spec)
        self._block_tokens = self.spec.tokens
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        """How many requests are known, preempted ones included."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def allocate(self, request_id: str, tokens: int, *, reuse: Sequence[BlockId] = ()) -> AllocationResult | NoSpace:
        """Begin a request with room for ``tokens``; the result is its whole table.

        ``reuse`` are full resident blocks that hold the beginning of its tokens (whoever names them has compared the
        tokens); they are pinned before anything is evicted.
        """
        if request_id in self._requests:
            raise RequestError(f"request {request_id} has blocks already")
        if tokens < 1:
            raise RequestError(f"request {request_id} of {tokens} tokens; it needs at least 1")
        reused = len(reuse)
        if reused * self._block_tokens > tokens:
            raise RequestError(f"request {request_id} of {tokens} tokens can't reuse {reused} full blocks")
        if reused:
            self._must_be_alike(reuse)
            self.pool.hold(reuse)
        result = self.pool.allocate(-(-tokens // self._block_tokens) - reused, self.spec)
        if isinstance(result, NoSpace):
            self.pool.release(reuse)
            return result
        if reused:
            result = AllocationResult(block_ids=(*reuse, *result.block_ids), tier=result.tier)
        self._requests[request_id] = _Request(list(result.block_ids), tokens, reused)
        return result

    def append(self, request_id: str, tokens: int = 1) -> Extension | NoSpace:
        """Make room for further tokens. O(1) while the last block has room and no fork shares it."""
        request = self._get(request_id, RequestState.RUNNING)
        if tokens < 1:
            raise RequestError(f"{tokens} tokens appended to request {request_id}; it needs at least 1")
        size = self._block_tokens
        grown = request.tokens + tokens
        blocks = request.blocks
        new = -(-grown // size) - len(blocks)
        last = blocks[-1]
        shared = request.tokens % size != 0 and self.pool.are_shared((last,))
        if not new and not shared:
            request.tokens = grown
            return IN_PLACE
        result = self.pool.allocate(new + shared, self.spec)
        if isinstance(result, NoSpace):
            return result
        request.tokens = grown
        if not shared:
            blocks += result.block_ids
            return Extension(block_ids=result.block_ids, copies=())
        copy, *joined = result.block_ids
        blocks[-1] = copy
        blocks += joined
        self.pool.free((last,))
        return Extension(block_ids=tuple(joined), copies=(BlockCopy(last, copy),))

    def fork(self, request_id: str, child_id: str) -> None:
        """Begin a request with the same past, on the same blocks. O(blocks), copies nothing."""
        parent = self._get(request_id, RequestState.RUNNING)
        if child_id in self._requests:
            raise RequestError(f"request {child_id} has blocks already")
        self.pool.hold(parent.blocks)
        self._requests[child_id] = _Request(list(parent.blocks), parent.tokens, parent.reused)

    def free(self, request_id: str, *, written_tokens: int | None = None, discard: Sequence[BlockId] = ()) -> None:
        """End a request. Its full blocks stay cached, as far as nobody else has them pinned.

        Not those beyond its first ``written_tokens`` (all by default), whose KV was never computed, nor those in
        ``discard``, for instance because the cache has the same KV in other blocks. Reused blocks count as written.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request {request_id} is not known (freed already, or never allocated)")
        if request.state is RequestState.RUNNING:
            full = self._full(request_id, request, written_tokens)
            if discard:
                unwanted = set(discard)
                strange = unwanted.difference(request.blocks)
                if strange:
                    raise AllocationError(f"request {request_id} has no block {strange.pop()} to discard")
                keep = [block for block in request.blocks[:full] if block not in unwanted]
                drop = [block for block in request.blocks if block in unwanted] + [
                    block for block in request.blocks[full:] if block not in unwanted
                ]
            else:
                keep, drop = request.blocks[:full], request.blocks[full:]
            self.pool.release(keep)
            self.pool.free(drop)
        elif discard or written_tokens is not None:
            raise RequestError(f"request {request_id} is preempted; it has no blocks to discard or to keep")
        del self._requests[request_id]

    def preempt(self, request_id: str, *, written_tokens: int | None = None) -> None:
        """Take a running request's blocks and remember how far it was. Its full, written ones stay cached."""
        request = self._get(request_id, RequestState.RUNNING)
        full = self._full(request_id, request, written_tokens)
        keep, drop = request.blocks[:full], request.blocks[full:]
        request.marks = self.pool.mark(keep)
        self.pool.release(keep)
        self.pool.free(drop)
        request.blocks = keep
        request.state = RequestState.PREEMPTED

    def resume(self, request_id: str) -> Resumption | NoSpace:
        """Give a preempted request a table again, with those of its first blocks that have stayed as they were."""
        request = self._get(request_id, RequestState.PREEMPTED)
        kept = []
        for block, mark in zip(request.blocks, request.marks, strict=True):
            if not self.pool.still_holds(block, mark):
                break
            kept.append(block)
        self.pool.hold(kept)
        result = self.pool.allocate(-(-request.tokens // self._block_tokens) - len(kept), self.spec)
        if isinstance(result, NoSpace):
            self.pool.release(kept)
            return result
        request.blocks = [*kept, *result.block_ids]
        request.marks = []
        request.reused = len(kept)
        request.state = RequestState.RUNNING
        return Resumption(block_ids=tuple(request.blocks), kept_tokens=len(kept) * self._block_tokens)

    def table(self, request_id: str) -> BlockTable:
        """Return a request as it is now; ``RequestError`` for an unknown one."""
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request {request_id} is not known (freed already, or never allocated)")
        running = request.state is RequestState.RUNNING
        return BlockTable(
            request_id=request_id,
            state=request.state,
            tokens=request.tokens,
            block_ids=tuple(request.blocks) if running else (),
        )

    def get_utilization(self) -> Utilization:
        """Return the pool's."""
        return self.pool.get_utilization()

    def get_fragmentation(self) -> Fragmentation:
        """Return the pool's, with internal fragmentation counted over the tables of running requests.

        ``internal_ratio`` is then: of the bytes that their blocks take (each counted once), the share that is not some
        token's KV, be it the unfilled part of a last block or what rounding loses. Cached blocks are full and would
        only flatter it. O(pool).
        """
        filled: dict[BlockId, int] = {}
        for request in self._requests.values():
            if request.state is RequestState.RUNNING:
                filled.update(dict.fromkeys(request.blocks, self._block_tokens))
        for request in self._requests.values():
            rest = request.tokens % self._block_tokens
            if request.state is RequestState.RUNNING and rest:
                filled[request.blocks[-1]] = rest
        taken = self.pool.space.reserved_bytes(list(filled))
        kv_bytes = sum(filled.values()) / self._block_tokens * self.spec.size_bytes
        return Fragmentation(
            internal_ratio=1 - kv_bytes / taken if taken else 0.0,
            external_ratio=self.pool.get_fragmentation().external_ratio,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when tables and pool contradict each other. O(pool)."""
        self.pool.check_integrity()
        holders: dict[BlockId, int] = {}
        for request_id, request in self._requests.items():
            if request.state is not RequestState.RUNNING:
                must(len(request.marks) == len(request.blocks), f"{request_id} has other marks than blocks")
                continue
            must(len(request.blocks) == -(-request.tokens // self._block_tokens), f"{request_id}'s table has a gap")
            must(len(set(request.blocks)) == len(request.blocks), f"{request_id} has a block twice")
            for block in request.blocks:
                holders[block] = holders.get(block, 0) + 1
        for block, count in holders.items():
            must(self.pool.references(block) >= count, f"block {block} has fewer references than owners")

    def _get(self, request_id: str, state: RequestState) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request {request_id} is not known (freed already, or never allocated)")
        if request.state is not state:
            raise RequestError(f"request {request_id} is {request.state}; this call needs a {state} one")
        return request

    def _full(self, request_id: str, request: _Request, written_tokens: int | None) -> int:
        if written_tokens is None:
            return request.tokens // self._block_tokens
        if not 0 <= written_tokens <= request.tokens:
            raise RequestError(f"{written_tokens} tokens written of request {request_id}, which has {request.tokens}")
        return max(written_tokens // self._block_tokens, request.reused)

    def _must_be_alike(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            if self.pool.space.spec(block) is not self.spec:
                raise AllocationError(f"block {block} is of another kind than {self.spec}")
