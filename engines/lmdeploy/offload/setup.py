"""From settings to tiers: the connector's configuration, the backends, and what LMDeploy's factory returns."""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.quotas import build_quotas
from engines.lmdeploy.offload.tiers import Built, EngineTiers
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.hashing import root_hash
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import BlockFileSpec, HierarchyConfig, HierarchyManager, HostArena
from kvcontrol.kv_runtime.backends.file import FileBackend
from kvcontrol.kv_runtime.header import header_bytes_for
from kvcontrol.prefetcher import Prefetcher

CONNECTOR = "KvgateOffload"
FILE_NAME = "kv.blocks"
MIN_DDR_BLOCKS = 8
_TIERS = "kvgate_tiers"
_LAYOUT = b"kvgate.layout"


class TierSetupError(RuntimeError):
    """The configured tiers can't be built for this engine; the message names the setting and what is possible."""


def tiers_of(cache_config: Any) -> EngineTiers | None:
    """Return the tiers of the engine with this cache configuration, None when it has none."""
    tiers: EngineTiers | None = getattr(cache_config, _TIERS, None)
    return tiers


def build_hierarchy(settings: EngineSettings, memory: EngineMemory, identity: CacheIdentity) -> Built:
    """Build the configured tiers over an engine's memory.

    Raises ``TierSetupError``, ``ArenaError`` or ``BackendError`` when the memory or the file can't be had.
    """
    contents = _Contents.of(memory, identity)
    arena = _arena(settings, contents)
    durable: FileBackend | None = None
    try:
        durable = None if settings.nvme_path is None else _file(settings, settings.nvme_path, contents)
        memory.pin(arena)
        capacity_blocks = {CacheTier.DDR: arena.slots}
        if durable is not None:
            capacity_blocks[CacheTier.NVME] = durable.capacity_blocks
        hierarchy = HierarchyManager(
            HierarchyConfig(
                write_mode=settings.write_mode,
                ddr=settings.ddr_watermarks,
                nvme=settings.nvme_watermarks,
                load_deadline_s=settings.load_deadline_s,
                migrate=settings.tier_migrate,
            ),
            engine=memory,
            arena=arena,
            durable=durable,
            make_policy=LruPolicy,
            quotas=build_quotas(settings, capacity_blocks, block_bytes=memory.block_bytes),
        )
    except BaseException:
        if durable is not None:
            durable.close()
        arena.close()
        raise

    def release() -> None:
        if durable is not None:
            durable.close()
        arena.close()

    prefetcher = (
        None
        if settings.prefetch_probability is None
        else Prefetcher(hierarchy, least_probability=settings.prefetch_probability)
    )
    return Built(hierarchy, arena, release, prefetcher)


class _Contents(NamedTuple):
    """What tiers are to hold: whose blocks, what must be equal for another process to use them, and their sizes."""

    owner: bytes
    identity: bytes
    block_bytes: int
    header_bytes: int

    @classmethod
    def of(cls, memory: EngineMemory, identity: CacheIdentity) -> Self:
        return cls(
            owner=blake2b(identity.model.encode(), digest_size=8, person=b"kvgate.owner").digest(),
            identity=blake2b(root_hash(identity) + memory.layout.encode(), digest_size=16, person=_LAYOUT).digest(),
            block_bytes=memory.block_bytes,
            header_bytes=header_bytes_for(identity.block_size_tokens),
        )

    def in_file(self, path: Path, slots: int) -> BlockFileSpec:
        return BlockFileSpec(path=path, slots=slots, **self._asdict())


def _arena(settings: EngineSettings, contents: _Contents) -> HostArena:
    block_bytes = contents.block_bytes
    slots = settings.ddr_bytes // block_bytes
    if slots < MIN_DDR_BLOCKS:
        raise TierSetupError(
            f"KVGATE_ENGINE_DDR_BYTES={settings.ddr_bytes} is {slots} blocks of {block_bytes} bytes; "
            f"at least {MIN_DDR_BLOCKS} are needed"
        )
    if settings.ddr_path is None:
        return HostArena(slots=slots, block_bytes=block_bytes)
    return HostArena.in_file(contents.in_file(settings.ddr_path, slots))


def _file(settings: EngineSettings, folder: Path, contents: _Contents) -> FileBackend:
    slots = settings.nvme_bytes // contents.block_bytes
    if slots == 0:
        raise TierSetupError(
            f"KVGATE_ENGINE_NVME_BYTES={settings.nvme_bytes} is less than one block of {contents.block_bytes} bytes"
        )
    return FileBackend(contents.in_file(folder / FILE_NAME, slots))


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def prepare_config(original: Callable[..., None]) -> Callable[..., None]:
    """``prepare_kv_connector_config``: with a DDR tier configured, the engine has our connector."""

    def prepare_kv_connector_config(
        cache_config: Any,
        *,
        model_path: str | None = None,
        dist_config: Any = None,
        distributed_executor_backend: str | None = None,
    ) -> None:
        settings = EngineSettings.load()
        if settings.ddr_bytes:
            _check(cache_config, dist_config)
            from lmdeploy.messages import KVTransferConfig

            cache_config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
        original(
            cache_config,
            model_path=model_path,
            dist_config=dist_config,
            distributed_executor_backend=distributed_executor_backend,
        )

    return prepare_kv_connector_config


def build_connector(original: Callable[..., Any]) -> Callable[..., Any]:
    """``build_kv_connector``: ours by its name, LMDeploy's otherwise."""

    def build_kv_connector(role: Any, cache_config: Any, **ranks: Any) -> Any:
        transfer = cache_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            return original(role, cache_config, **ranks)
        from lmdeploy.pytorch.kv_connector.base import KVConnectorRole

        from engines.lmdeploy.offload.connector import OffloadConnector

        tiers = tiers_of(cache_config)
        if tiers is None:
            if role is not KVConnectorRole.WORKER:
                raise TierSetupError("the engine's scheduler and its model are not in one process")
            pages = int(cache_config.block_size) // int(cache_config.kernel_block_size)
            tiers = EngineTiers(pages_per_block=pages, deadline_s=EngineSettings.load().load_deadline_s)
            setattr(cache_config, _TIERS, tiers)
        return OffloadConnector(role, tiers)

    return build_kv_connector


def _check(cache_config: Any, dist_config: Any) -> None:
    """Refuse what the tiers can't hold correctly, at start-up."""
    name = "KVGATE_ENGINE_DDR_BYTES"
    if cache_config.kv_transfer_config is not None:
        raise TierSetupError(f"{name} and LMDeploy's --kv-transfer-config exclude each other; leave one of them out")
    if dist_config is not None and (int(dist_config.attn_tp) > 1 or int(dist_config.dp) > 1):
        raise TierSetupError(f"{name} needs an engine on one device (tp 1, dp 1); run one instance per device instead")
    if cache_config.states_shapes:
        raise TierSetupError(f"{name} can't be used with a model that keeps states besides KV blocks")
    if int(cache_config.window_size) > 1:
        raise TierSetupError(f"{name} can't be used with sliding-window attention: a block's KV outlives its window")
    if int(cache_config.num_cpu_blocks) > 0:
        raise TierSetupError(f"{name} and LMDeploy's own CPU blocks exclude each other; set num_cpu_blocks to 0")
