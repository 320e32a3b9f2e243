"""Gives other instances blocks out of this one's tiers: the saving side of a prompt that is handed over.

A prompt's last blocks are still on their way to DDR when its answer goes out, so a block that is arriving is waited
for, and one that lies in NVMe alone is brought up. What isn't there then is not offered, and what is dropped on the way
(other weights, a reset) is not sent: the peer computes it.
"""

import time
from collections.abc import Sequence

from engines.control.calls import EngineBusyError
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.pd.block_wire import TAKEN, BlockOffer, offer_blocks, path_of, read_wanted, refuse
from engines.lmdeploy.pd.wire import Connection, TransferError, expect
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import HierarchyManager, HostArena, Lent, Short

_CALL_S = 5.0
"""How long a thread of the door waits for the engine's."""
_POLL_S = 0.005


class PdLender:
    """Speaks with one borrower at a time on each thread; ``wait_s`` bounds the waiting for blocks that arrive."""

    def __init__(self, tiers: EngineTiers, calls: EngineCalls, *, layout: str, wait_s: float) -> None:
        self._tiers = tiers
        self._calls = calls
        self._layout = layout
        self._wait_s = wait_s
        self.handed_over = 0

    def serve(self, connection: Connection) -> None:
        """See ``PdServer``; raises ``TransferError``."""
        wanted = read_wanted(connection)
        hierarchy, arena = self._tiers.hierarchy, self._tiers.arena
        if hierarchy is None or arena is None:
            refuse(connection, "there are no tiers here now")
        elif wanted.layout != self._layout:
            refuse(connection, "blocks are put together otherwise here: another model, precision or version")
        else:
            self._lend(connection, hierarchy, arena, path_of(wanted))

    def _lend(
        self, connection: Connection, hierarchy: HierarchyManager, arena: HostArena, path: Sequence[BlockHash]
    ) -> None:
        lent: list[Lent] = []
        try:
            self._gather(hierarchy, path, lent)
            if not lent:
                refuse(connection, "none of these blocks is here")
                return
            offer = BlockOffer(
                parents=[each.seal.record.parent or b"" for each in lent],
                tokens=[each.seal.record.tokens for each in lent],
                checksums=[each.seal.checksum for each in lent],
            )
            for each in lent[: offer_blocks(connection, offer)]:
                if each.block.dropped:
                    raise TransferError("refused", "the blocks were dropped while a peer read them")
                with arena.view(each.slot) as view:
                    connection.send(view)
            expect(connection, TAKEN)
            self.handed_over += 1
        finally:
            self._calls.post(lambda: hierarchy.exchange.back(lent))

    def _gather(self, hierarchy: HierarchyManager, path: Sequence[BlockHash], lent: list[Lent]) -> None:
        """Fill ``lent``, on the engine's thread: also when it gets to that too late for us to wait."""
        until_s = time.monotonic() + self._wait_s
        requested = False

        def work() -> bool:
            nonlocal requested
            standing = hierarchy.exchange.standing(path)
            if standing.below and not requested:
                requested = True
                hierarchy.prefetch(standing.below)
            if standing.short in {Short.ARRIVING, Short.BELOW} and time.monotonic() < until_s:
                return False
            lent.extend(hierarchy.exchange.lend(path))
            return True

        try:
            while not self._calls(work, timeout_s=_CALL_S):
                time.sleep(_POLL_S)
        except EngineBusyError as error:
            raise TransferError("busy", str(error)) from error
