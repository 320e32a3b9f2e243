"""What the gateway knows of a simulated instance: the snapshot that its health check would bring."""

from typing import Final

from engines.sim.profile import Links, Profile
from gateway.registry import Instance, InstanceState, Model
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import (
    EventsInfo,
    InstanceStats,
    LoadStats,
    OffloadStats,
    PathStats,
    PrefixCacheStats,
    TierStats,
)
from kvcontrol.core.ids import Epoch, InstanceId

MODEL: Final = "simulated"


def snapshot(name: InstanceId, profile: Profile, identity: CacheIdentity) -> Instance:
    """Return the gateway's snapshot of a healthy instance that has measured its links."""
    shape, links = profile.engine, profile.links
    blocks = {CacheTier.HBM: shape.hbm_blocks, CacheTier.DDR: shape.ddr_blocks, CacheTier.NVME: shape.nvme_blocks}
    stats = InstanceStats(
        epoch=Epoch(name),
        engine="sim",
        engine_version="1",
        device="sim",
        started_at_s=0.0,
        context_length_tokens=shape.context_tokens,
        identity=identity,
        events=EventsInfo(endpoint="", replay_endpoint="", seq=-1),
        tiers={
            tier: TierStats(capacity_blocks=there, used_blocks=0, cached_blocks=0, block_bytes=shape.block_bytes)
            for tier, there in blocks.items()
            if there
        },
        load=LoadStats(running=0, waiting=0, max_batch_size=shape.max_batch),
        prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
        offload=_measured(links) if shape.ddr_blocks else None,
    )
    return Instance(
        id=name,
        url="",
        state=InstanceState.HEALTHY,
        reason="simulated",
        models=(Model(id=MODEL, card={}),),
        stats=stats,
        settled=True,
    )


def _measured(links: Links) -> OffloadStats:
    """What an instance with these links says of them."""
    return OffloadStats(
        loads=0,
        failed_loads=0,
        declined_loads=0,
        saves=0,
        tail_saves=0,
        looked_up_tokens=0,
        found_tokens=0,
        collisions=0,
        prefill_tokens_per_s=0.0,
        outcomes={},
        losses={},
        paths={
            name: PathStats(
                moved_blocks=0, moved_bytes=0, failed_blocks=0, queued_blocks=0, bandwidth_bytes_per_s=bandwidth
            )
            for name, bandwidth in (
                ("ddr_to_hbm", links.ddr_to_hbm_bytes_per_s),
                ("nvme_to_ddr", links.nvme_to_ddr_bytes_per_s),
            )
        },
        guard_errors=0,
        worker_faults=0,
    )
