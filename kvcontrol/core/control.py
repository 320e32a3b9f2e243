"""The bodies of ``/kv/v1`` on an engine instance: what the gateway asks, what the instance answers.

Both sides use these definitions; JSON on the wire, hashes as lower-case hex. Unknown fields are ignored, so that an
older gateway can read a newer engine.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash, Epoch, Seq
from kvcontrol.core.pd import PdStats
from kvcontrol.core.roles import EngineRole, KVTransport

Residents = Mapping[CacheTier, Sequence[tuple[BlockHash, BlockHash | None]]]
"""What is held: in each tier, blocks with their parents (None for the first block of a prompt), parents first."""


class EventsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV events are published, and how far they have come.

    ``seq`` is the number of the last published batch, -1 before the first. ``dropped`` counts events that were lost
    before publishing (a full queue): when it grows, what is resident is told anew. ``hook_errors`` counts changes of
    the cache that could not be announced: blocks that no subscriber will ever hear of.
    """

    endpoint: str
    replay_endpoint: str
    seq: int
    dropped: int = 0
    hook_errors: int = 0


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier: ``cached_blocks`` are those that a later request could reuse, ``used_blocks`` those that requests hold
    or the cache keeps; ``capacity_blocks`` is what can be allocated in all.
    """

    capacity_blocks: int
    used_blocks: int
    cached_blocks: int
    block_bytes: int


class PathStats(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two tiers. ``bandwidth_bytes_per_s`` is a moving average of what was measured, 0 before."""

    moved_blocks: int
    moved_bytes: int
    failed_blocks: int
    queued_blocks: int
    bandwidth_bytes_per_s: float


class PredictionStats(msgspec.Struct, frozen=True, kw_only=True):
    """How wrong predictions of one quantity were: ``relative_error`` is |predicted - actual| / actual, ``bias`` the
    same with its sign; both fade.
    """

    predictions: int
    relative_error: float
    bias: float


class BenefitStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks whose move down one path was judged worth it or not, and so declined; seconds that moves should save."""

    worth_blocks: int
    not_worth_blocks: int
    declined_blocks: int
    net_benefit_s: float


class OffloadStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the tiers below HBM do for the engine; totals since its start.

    ``loads`` and ``failed_loads`` count requests that were restored, and those whose restore failed; ``declined_loads``
    those that computing served faster; ``tail_saves`` requests whose last blocks, filled by decoding, were saved at
    their end.
    ``outcomes`` counts blocks by ``operation:status:reason``, ``losses`` by ``tier:reason``. ``collisions`` are blocks
    whose hash was equal and whose tokens were not. ``guard_errors`` and ``worker_faults`` other than 0 are defects.
    ``failed_saves_in_a_row`` are saves of which no block arrived since one last did; ``save_failure`` says why, once
    they are many: then the tiers keep nothing.
    ``paths`` are named ``hbm_to_ddr`` and so on. ``lookup_p50_s`` and ``lookup_p99_s`` say how long the engine's
    loop was held by looking for a prompt's blocks below HBM, 0 before the first look-up. ``predictions`` are named
    ``load`` and ``compute``; ``break_even_blocks`` says from how many blocks on a load from a tier beats computing,
    -1 where it never does, for tiers of which that is known. ``prefetches`` counts blocks brought up ahead:
    ``prefetched``, and of them ``used`` and ``wasted``; empty where nothing is.
    """

    loads: int
    failed_loads: int
    declined_loads: int
    saves: int
    tail_saves: int
    looked_up_tokens: int
    found_tokens: int
    collisions: int
    prefill_tokens_per_s: float
    outcomes: dict[str, int]
    losses: dict[str, int]
    paths: dict[str, PathStats]
    guard_errors: int
    worker_faults: int
    lookup_p50_s: float = 0.0
    lookup_p99_s: float = 0.0
    predictions: dict[str, PredictionStats] = {}
    benefits: dict[str, BenefitStats] = {}
    break_even_blocks: dict[CacheTier, float] = {}
    prefetches: dict[str, int] = {}
    failed_saves_in_a_row: int = 0
    save_failure: str = ""


class LoadStats(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the engine's scheduler now, and how many it runs at most at once."""

    running: int
    waiting: int
    max_batch_size: int


class PrefixCacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens looked up in, and found in, the engine's own prefix cache since it started."""

    query_tokens: int
    hit_tokens: int


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/stats``. ``device`` is ``cpu`` or ``cuda``; ``identity`` is what block hashes are rooted in.

    ``transports`` says how the instance can hand KV over or take it: by each transport, within which domain. Two
    instances reach each other when both name the same domain (the same store, the same kind of link).
    ``pd`` is what it has done of others' requests, absent for one that does whole requests alone. ``warm_up_s`` is how
    long it compiled before it was ready, absent for one that did not.
    """

    epoch: Epoch
    engine: str
    engine_version: str
    device: str
    started_at_s: float
    context_length_tokens: int
    identity: CacheIdentity
    events: EventsInfo
    tiers: dict[CacheTier, TierStats]
    load: LoadStats
    prefix_cache: PrefixCacheStats
    offload: OffloadStats | None = None
    role: EngineRole = EngineRole.HYBRID
    transports: dict[KVTransport, str] = {}
    pd: PdStats | None = None
    warm_up_s: float | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/snapshot``: every resident block after applying all event batches up to and including ``seq``.

    ``tiers`` maps a tier to the hex hashes of the blocks that it holds, parents before children; ``parents`` has, place
    by place, the hex hash of each one's parent, "" for the first block of a prompt. A parent need not be resident.
    ``SnapshotReader`` reads one that a peer sent.
    """

    epoch: Epoch
    seq: int
    identity: CacheIdentity
    tiers: dict[CacheTier, list[str]]
    parents: dict[CacheTier, list[str]]

    @classmethod
    def of(cls, *, epoch: Epoch, seq: Seq, identity: CacheIdentity, residents: Residents) -> Self:
        """Build a snapshot of ``residents``."""
        return cls(
            epoch=epoch,
            seq=seq,
            identity=identity,
            tiers={tier: [block.hex() for block, _ in blocks] for tier, blocks in residents.items()},
            parents={tier: [(parent or b"").hex() for _, parent in blocks] for tier, blocks in residents.items()},
        )

    def hashes(self, tier: CacheTier) -> list[BlockHash]:
        """Return one tier's blocks; raises ``ValueError`` when one is not hex."""
        return [BlockHash(bytes.fromhex(text)) for text in self.tiers.get(tier, [])]


STATS_PATH = "/kv/v1/stats"
SNAPSHOT_PATH = "/kv/v1/snapshot"

CACHE_SALT_HEADER = "x-kvgate-cache-salt"
"""Request header from the gateway to an engine: the tenant's salt. Only the gateway sets it; a client's is dropped."""

PRIORITY_HEADER = "x-kvgate-priority"
"""Request header from the gateway to an engine: its ``Priority``: the tenant's, or what it has risen to by
waiting for a turn. Absent, it is normal; a client's is dropped.
"""

DEADLINE_HEADER = "x-kvgate-deadline-ms"
"""Request header from the gateway to an engine: in how many milliseconds from now its first token is due. Absent, at no
particular time; a client's is dropped.
"""
