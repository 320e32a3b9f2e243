"""LMDeploy's migration over TCP: a ``MigrationBackendImpl`` between processes that share no memory and no RDMA.

LMDeploy plans a transfer as byte ranges of two registered pools and hands it to a back end. This one reads the ranges
of the *remote* pool, in the plan's order, off a connection that the decode side has opened with its ticket, and copies
them into the local pool only when all of them have arrived, every checksum was right and the request still wants them;
so a blow in mid-transfer, or a cancelled request whose blocks belong to another by now, writes nothing.
"""

import asyncio
import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engines.lmdeploy.pd.transport import transport_of
from engines.lmdeploy.pd.wire import GO, Connection, TransferError, receive_frames
from engines.lmdeploy.settings import EngineSettings, PdTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The transfer that this task makes: its connection, its size, and whether the blocks are still wanted."""

    connection: Connection
    total_bytes: int
    wanted: Callable[[], bool]


current_delivery: ContextVar[Delivery] = ContextVar("kvgate_pd_delivery")
"""Set around LMDeploy's ``migrate`` by who has opened the connection."""


@dataclass(slots=True)
class _Link:
    remote_engine_config: Any
    """LMDeploy reads it here when a link is connected."""
    regions: dict[int, tuple[int, int]] = field(default_factory=dict)


class TcpBackend:
    """See LMDeploy's ``MigrationBackendImpl``; host memory only."""

    def __init__(self) -> None:
        self.links: dict[str, _Link] = {}

    def p2p_initialize(self, init_request: Any) -> None:
        """Begin a link; one that there was to the same engine is replaced."""
        self.links[init_request.remote_engine_id] = _Link(init_request.remote_engine_config)

    def register_memory_region(self, register_mr_request: Any) -> None:
        """Note a pool that blocks may be written to."""
        link = self.links[register_mr_request.remote_engine_id]
        link.regions[register_mr_request.mr_key] = (register_mr_request.addr, register_mr_request.length)

    def endpoint_info(self, remote_engine_id: str, protocol: Any) -> dict[str, str]:
        """Does nothing: each request contains its own address."""
        del remote_engine_id, protocol
        return {}

    def p2p_connect(self, remote_engine_id: str, conn_req: Any) -> None:
        """Nothing to do before the first transfer."""
        del remote_engine_id, conn_req

    async def p2p_migrate(self, assignment: Any, async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - LMDeploy's
        """Bring one prompt's blocks; raises ``TransferError``, and then nothing has been written."""
        del async_op
        delivery = current_delivery.get(None)
        if delivery is None:
            raise TransferError("protocol", "a transfer without a ticket is not served over TCP")
        regions = self.links[assignment.remote_engine_id].regions
        ranges = [(each.mr_key, each.source_offset, each.length) for each in assignment.batch]
        for key, offset, length in ranges:
            if key not in regions or not 0 <= offset <= offset + length <= regions[key][1]:
                raise TransferError("layout", "the plan of the transfer leaves the pool")
        total_bytes = sum(length for _, _, length in ranges)
        if total_bytes != delivery.total_bytes:
            raise TransferError("layout", f"{delivery.total_bytes} bytes are offered where {total_bytes} are needed")
        data = await asyncio.get_running_loop().run_in_executor(None, _receive, delivery)
        if not delivery.wanted():
            raise TransferError("unwanted", "the request went away during the transfer")
        source = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
        for key, offset, length in ranges:
            ctypes.memmove(regions[key][0] + offset, source, length)
            source += length

    def store(self, assignment: Any, async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - LMDeploy's
        """Not part of migration between two engines."""
        raise NotImplementedError

    def load(self, assignment: Any, async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - LMDeploy's
        """Not part of migration between two engines."""
        raise NotImplementedError


def _receive(delivery: Delivery) -> bytearray:
    delivery.connection.send(GO)
    return receive_frames(delivery.connection, delivery.total_bytes)


def cache_engine_p2p_initialize(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``CacheEngine.p2p_initialize``: LMDeploy has no back end for its own ``MigrationProtocol.TCP`` without RDMA."""

    def p2p_initialize(self: Any, migration_init_request: Any) -> Any:
        from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol

        if migration_init_request.protocol is MigrationProtocol.TCP and self.migration_backend_impl is None:
            device = "cpu" if all(pool.tensor.device.type == "cpu" for pool in self.gpu_allocation.pools) else "cuda"
            if transport_of(EngineSettings.load(), device) is PdTransport.TCP:
                self.migration_backend_impl = TcpBackend()
        return original(self, migration_init_request)

    return p2p_initialize
