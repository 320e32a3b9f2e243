"""Brings blocks from another instance's tiers into this one's: the loading side of a prompt that is handed over.

A request whose prompt was computed elsewhere waits in LMDeploy's queue while its blocks come (LMDeploy asks again, and
runs others); then they lie in DDR and are loaded as any others are. Bytes go from the wire into the arena's slots, and
count only with the checksum that they were sealed with, under the hash and the tokens of this very prompt. Whatever
goes wrong, the blocks that came are used and the rest of the prompt is computed here.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from engines.lmdeploy.offload.plan import SupplyPath
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.pd.block_wire import TAKEN, BlockOffer, Wanted, ask, take
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.request import part_of
from engines.lmdeploy.pd.wire import Connection, TransferError
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.pd import Load
from kvcontrol.kv_runtime import Berth, BlockRecord, BlockSeal, HierarchyManager, HostArena, checksum

MAX_TRANSFERS = 16
"""Prompts whose blocks are brought at once; each costs a thread, and slots of DDR."""

_BORROWED = "kvgate_borrowed_tokens"
_log = logging.getLogger("lmdeploy.kvgate")


@dataclass(slots=True)
class _Transfer:
    """One request's blocks; ``held`` are kept from eviction until its loads are planned."""

    request_id: int
    source: Load
    path: SupplyPath
    first: int
    until_s: float
    done: bool = False
    given_up: bool = False
    connection: Connection | None = None
    held: tuple[BlockId, ...] = ()
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Received:
    """Checksums of the blocks that arrived whole, in order, and the error that ended the transfer early."""

    checksums: list[int] = field(default_factory=list)
    error: TransferError | None = None


class PdBorrower:
    """See ``Supply``; ``timeout_s`` bounds each transfer, its waiting for a place included."""

    def __init__(self, tiers: EngineTiers, peers: Peers, *, layout: str, timeout_s: float) -> None:
        self._tiers = tiers
        self._peers = peers
        self._layout = layout
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="kvgate-pd-load")
        self._transfers: dict[int, _Transfer] = {}
        self._coming: set[BlockHash] = set()
        """The first block of each transfer: who wants the same waits, and then for what is missing after it."""
        self._until_s: dict[int, float] = {}
        """When a request that waits goes on without."""
        self.fetched = 0
        self.fetched_bytes = 0
        self.transfer_s = 0.0
        self.recomputed: Counter[str] = Counter()

    def close(self) -> None:
        """End all transfers; their threads end by themselves."""
        for transfer in list(self._transfers.values()):
            _give_up(transfer)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # See ``Supply``.

    def is_for(self, seq: Any) -> bool:
        """See ``Supply``."""
        return isinstance(part_of(seq.sampling_param), Load)

    def awaits(self, seq: Any, path: SupplyPath, computed_blocks: int) -> bool:
        """See ``Supply``."""
        transfer = self._transfers.get(int(seq.seq_id))
        if transfer is not None:
            return not transfer.done
        hierarchy, arena, source = self._tiers.hierarchy, self._tiers.arena, part_of(seq.sampling_param)
        if hierarchy is None or arena is None or not isinstance(source, Load):
            return False
        chain = path.chain
        first = computed_blocks + len(
            hierarchy.find_run(chain.keys, chain.block_tokens, computed_blocks, path.limit).block_ids
        )
        if first >= path.limit:
            return False
        request_id, key = int(seq.seq_id), chain.keys[first]
        until_s = self._until_s.setdefault(request_id, time.monotonic() + self._timeout_s)
        if key in self._coming or hierarchy.exchange.is_arriving(key):
            return True
        transfer = self._transfers[request_id] = _Transfer(request_id, source, path, first, until_s)
        self._coming.add(key)
        transfer.task = asyncio.get_running_loop().create_task(self._bring(transfer, hierarchy, arena))
        return True

    def settled(self, seq: Any) -> None:
        """See ``Supply``."""
        transfer = self._transfers.get(int(seq.seq_id))
        if transfer is not None:
            setattr(seq, _BORROWED, len(transfer.held) * transfer.path.chain.block_size_tokens)
            self._release(transfer)

    def forget(self, request_id: int) -> None:
        """See ``Supply``."""
        self._until_s.pop(request_id, None)
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            self._release(transfer)
            _give_up(transfer)

    # Inside.

    def _release(self, transfer: _Transfer) -> None:
        held, transfer.held = transfer.held, ()
        if held and self._tiers.hierarchy is not None:
            self._tiers.hierarchy.claims.release(held)

    async def _bring(self, transfer: _Transfer, hierarchy: HierarchyManager, arena: HostArena) -> None:
        """Fetch one request's blocks; failures are counted, and nothing stays reserved."""
        began_s = time.monotonic()
        try:
            received = await self._transfer(transfer, hierarchy, arena)
        except TransferError as error:
            received = _Received(error=error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this prompt's alone
            _log.exception("request %d: its blocks could not be brought", transfer.request_id)
            received = _Received(error=TransferError("error", repr(error)))
        finally:
            transfer.done = True
            self._coming.discard(transfer.path.chain.keys[transfer.first])
            if transfer.connection is not None:
                transfer.connection.close()
        self.fetched_bytes += len(received.checksums) * arena.block_bytes
        self.transfer_s += time.monotonic() - began_s
        if received.error is None:
            self.fetched += 1
        elif not transfer.given_up:
            self.recomputed[received.error.cause] += 1
            _log.warning(
                "request %d is prefilled here after %d blocks (%s): %s",
                transfer.request_id,
                transfer.first + len(received.checksums),
                received.error.cause,
                received.error,
            )

    async def _transfer(self, transfer: _Transfer, hierarchy: HierarchyManager, arena: HostArena) -> _Received:
        run = asyncio.get_running_loop().run_in_executor
        connection, offer = await run(self._threads, self._ask, transfer)
        records = _records(transfer, offer)
        if transfer.given_up:  # maybe because blocks have other names by now
            raise TransferError("given_up", "the request for the blocks has ended")
        berths = hierarchy.exchange.expect(records)
        if not berths:
            if hierarchy.exchange.is_arriving(records[0].key):
                raise TransferError("arriving", "the blocks are on their way already, for another request")
            raise TransferError("no_room", "DDR has no room for the peer's blocks")
        # One that is cancelled here, with the engine's loop, leaves its slots out: the thread may still write to them.
        received = await run(self._threads, _receive, connection, arena, berths, offer)
        landed = hierarchy.exchange.arrived(berths, received.checksums)
        if not transfer.given_up:
            transfer.held = hierarchy.claims.hold(landed)
        if received.error is None and len(berths) < len(records):
            received.error = TransferError("no_room", "DDR has no room for all of the peer's blocks")
        return received

    def _ask(self, transfer: _Transfer) -> tuple[Connection, BlockOffer]:
        left_s = transfer.until_s - time.monotonic()
        if left_s <= 0:
            raise TransferError("timeout", "the transfer queue was too long: earlier transfers took the time limit")
        connection = self._peers.connect(transfer.source.host, transfer.source.port, timeout_s=left_s)
        transfer.connection = connection
        if transfer.given_up:
            connection.close()
        keys = transfer.path.chain.keys[transfer.first : transfer.path.limit]
        return connection, ask(connection, Wanted(layout=self._layout, keys=list(keys)))


def _give_up(transfer: _Transfer) -> None:
    """End a transfer soon; whole blocks that arrived are kept."""
    transfer.given_up = True
    if transfer.connection is not None and not transfer.done:
        transfer.connection.close()


def _records(transfer: _Transfer, offer: BlockOffer) -> list[BlockRecord]:
    """Return the offered blocks, after a check that they belong to the same prompt."""
    chain, tenant = transfer.path.chain, transfer.path.tenant
    records = []
    for place, (parent, tokens) in enumerate(zip(offer.parents, offer.tokens, strict=True), transfer.first):
        if tokens != chain.tokens(place) or (parent or None) != chain.parent(place):
            raise TransferError("tokens", "the peer's blocks are of another prompt")
        records.append(BlockRecord(chain.keys[place], chain.parent(place), chain.tokens(place), tenant))
    return records


def _receive(connection: Connection, arena: HostArena, berths: Sequence[Berth], offer: BlockOffer) -> _Received:
    """Fill slots, each verified before the next is looked at; never raises."""
    received = _Received()
    try:
        take(connection, len(berths))
        for (slot, block, _), expected in zip(berths, offer.checksums, strict=False):
            _fill(connection, arena, slot, expected)
            arena.seal(slot, BlockSeal(block.record, expected))
            received.checksums.append(expected)
        connection.send(TAKEN)
    except TransferError as error:
        received.error = error
    except Exception as error:  # noqa: BLE001  # the slots have to come back, whatever it is
        _log.exception("blocks could not be received")
        received.error = TransferError("error", repr(error))
    return received


def _fill(connection: Connection, arena: HostArena, slot: int, expected: int) -> None:
    with arena.view(slot) as view:
        connection.fill(view)
        found = checksum(view)
    if found != expected:
        raise TransferError("checksum", "bytes changed on their way")


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def finalize_match(original: Any) -> Any:
    """``BlockTrie.finalize_match``: blocks that another instance has just computed do not count as cached."""
    function = original.__func__

    def finalize_match(seq: Any) -> None:
        function(seq)
        borrowed = getattr(seq, _BORROWED, 0)
        if borrowed:
            seq.cached_tokens = max(0, int(seq.cached_tokens) - borrowed)

    return staticmethod(finalize_match)
