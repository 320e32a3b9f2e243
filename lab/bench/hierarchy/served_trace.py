"""Serves a trace through the real tiers, without bytes: what comes from HBM, DDR and NVMe, what is computed again?

An engine that serves one request after another, with a prefix cache of ``hbm_blocks`` slots: the leading blocks that it
has are held and used; the run of blocks that follows and lies below HBM is loaded by ``HierarchyManager`` into slots
that its policy gives up; the rest is computed; and what of the prompt lies nowhere below HBM is saved. So every block
goes the way that it goes inside an engine: look-up, holds, quotas, eviction in each tier, writes to NVMe; only the
backends are of metadata. A prompt longer than HBM is cached as far as HBM goes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import HASH_BYTES, TOKEN_BYTES
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.kv_policy import EvictionPolicy, PolicyContext, TailsFirst
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backends.metadata import DurableMetadataBackend, MetadataBackend
from kvcontrol.kv_runtime.crew import SteppedCrew
from kvcontrol.kv_runtime.hierarchy import HierarchyManager
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.record import BlockRecord
from kvcontrol.kv_runtime.ticket import Finished, SaveRequest, TicketId
from lab.research.fairness import jain_index
from lab.traces import Request

_BLOCK_BYTES: Final = 1
_DURABLE_BATCH, _SAVE_BATCH, _LOAD_BATCH = 4, 36, 146
"""Blocks of 3.67 MB (64 tokens of a 7B model) in the migrator's batches; a disk's write waits until one is full."""
_QUEUE_BLOCKS: Final = 1 << 20

MakePolicy = Callable[[str, int], EvictionPolicy]
"""A policy by its name, for so many blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Blocks of each tier; ``ddr`` 0 is an engine without tiers, ``nvme`` 0 one without a durable one."""

    hbm: int
    ddr: int = 0
    nvme: int = 0

    def __post_init__(self) -> None:
        if self.hbm < 1 or self.ddr < 0 or self.nvme < 0 or (self.nvme and not self.ddr):
            raise ValueError(
                f"sizes of {self.hbm}, {self.ddr} and {self.nvme} blocks; HBM must be > 0, and NVMe needs DDR above it"
            )


@dataclass(slots=True)
class Tokens:
    """Prompt tokens by where they came from. ``again`` were computed though an earlier request had computed them."""

    prompt: int = 0
    hbm: int = 0
    ddr: int = 0
    nvme: int = 0
    again: int = 0

    @property
    def found(self) -> int:
        """What was in some tier."""
        return self.hbm + self.ddr + self.nvme

    @property
    def reusable(self) -> int:
        """What a cache with room for everything would have had."""
        return self.found + self.again


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A trace's end. ``tenants`` are its sessions; ``course`` has, per window of requests, the tokens of it."""

    total: Tokens
    tenants: dict[str, Tokens]
    course: tuple[Tokens, ...]
    evicted_last: int
    """Blocks that left the last tier that had them."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found."""
        return _share(self.total.found, self.total.prompt)

    @property
    def ceiling(self) -> float:
        """The same with room for everything."""
        return _share(self.total.reusable, self.total.prompt)

    @property
    def of_ceiling(self) -> float:
        """Share of the ceiling that was found."""
        return _share(self.total.found, self.total.reusable)

    @property
    def re_prefill_rate(self) -> float:
        """Share of prompt tokens that were computed again."""
        return _share(self.total.again, self.total.prompt)

    @property
    def fairness(self) -> float:
        """Jain's index over tenants of the share found of what each could have found."""
        return jain_index(_share(own.found, own.reusable) for own in self.tenants.values() if own.reusable)


class TracedEngine:
    """See the module's text. ``policy`` names every tier's; ``close`` it at the end."""

    def __init__(self, sizes: Sizes, *, policy: str, make_policy: MakePolicy) -> None:
        self.tokens: dict[str, Tokens] = {}
        self._sizes = sizes
        self._policy = TailsFirst(make_policy(policy, sizes.hbm))
        self._free = list(range(sizes.hbm))
        self._slots: dict[int, int] = {}
        """Contents in HBM, and their slots; a slot is the block's name to the policy."""
        self._contents: dict[int, int] = {}
        self._seen: set[int] = set()
        self._crew = SteppedCrew()
        self._arena = HostArena(slots=max(1, sizes.ddr), block_bytes=_BLOCK_BYTES)
        self._hierarchy: HierarchyManager | None = None
        if sizes.ddr:
            self._hierarchy = HierarchyManager(
                HierarchyConfig(
                    migrator=MigratorConfig(
                        batch_bytes=_DURABLE_BATCH * _BLOCK_BYTES,
                        engine_batch_bytes=_SAVE_BATCH * _BLOCK_BYTES,
                        load_batch_bytes=_LOAD_BATCH * _BLOCK_BYTES,
                        queue_blocks=_QUEUE_BLOCKS,
                    )
                ),
                engine=MetadataBackend(CacheTier.HBM, capacity_blocks=sizes.hbm, block_bytes=_BLOCK_BYTES),
                arena=self._arena,
                durable=(
                    DurableMetadataBackend(capacity_blocks=sizes.nvme, block_bytes=_BLOCK_BYTES) if sizes.nvme else None
                ),
                make_policy=lambda: make_policy(policy, sizes.ddr),
                quotas=QuotaManager(),
                crew=self._crew,
            )
        self._finished: dict[TicketId, Finished] = {}

    @property
    def evicted_last(self) -> int:
        """Blocks that left the last tier below HBM that had them."""
        if self._hierarchy is None:
            return 0
        stats = self._hierarchy.stats()
        return sum(count for tier in stats.tiers.values() for loss, count in tier.losses.items() if "last" in loss)

    def serve(self, request: Request) -> Tokens:
        """Serve one request to its end, and return where its tokens came from."""
        tenant = request.session or SHARED_TENANT
        ids = request.block_ids[: self._sizes.hbm]
        hit = self._leading(ids)
        held = [BlockId(self._slots[content]) for content in ids[:hit]]
        keys = [_key(content) for content in ids]
        self._policy.hold(held)
        self._policy.requested(keys, block_tokens=request.block_tokens, prompt_tokens=request.prompt_tokens)
        self._policy.access(held)
        own = [content.to_bytes(2 * TOKEN_BYTES, "little") for content in ids]
        if self._hierarchy is not None:
            self._hierarchy.requested(
                Prompt(
                    keys=keys,
                    tokens=own,
                    tenant=tenant,
                    block_tokens=request.block_tokens,
                    prompt_tokens=min(request.prompt_tokens, len(ids) * request.block_tokens),
                )
            )
        below, tiers = self._load(ids, keys, own, hit)
        self._take_in(ids, keys, hit, self._slots_for(len(ids) - hit - len(below), keys[hit + len(below) :], below))
        self._save(ids, keys, own, tenant)
        self._policy.release([BlockId(self._slots[content]) for content in ids])
        said = self._count(request, hit, tiers)
        total = self.tokens.setdefault(tenant, Tokens())
        _add(total, said)
        return said

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when policy, slots and tiers contradict each other. O(blocks)."""
        self._policy.check_integrity()
        if not len(self._policy) == len(self._slots) == self._sizes.hbm - len(self._free):
            raise AssertionError(f"{len(self._policy)} blocks in the policy, {len(self._slots)} in slots")
        if self._hierarchy is not None:
            self._hierarchy.check_integrity()

    def close(self) -> None:
        """Let go of the tiers."""
        if self._hierarchy is not None:
            self._hierarchy.close()
        self._arena.close()

    def _leading(self, ids: Sequence[int]) -> int:
        slots = self._slots
        return next((place for place, content in enumerate(ids) if content not in slots), len(ids))

    def _load(
        self, ids: Sequence[int], keys: Sequence[BlockHash], own: Sequence[bytes], hit: int
    ) -> tuple[list[int], list[CacheTier]]:
        """Load what follows on the first ``hit`` blocks; returns slots that were filled, and from which tiers."""
        hierarchy = self._hierarchy
        if hierarchy is None or hit == len(ids):
            return [], []
        run = hierarchy.find_run(keys, own, hit, len(ids)).block_ids
        if not run:
            return [], []
        hierarchy.claims.hold(run)
        tiers = [hierarchy.locate(block)[0] for block in run]
        slots = self._slots_for(len(run), keys[hit:], [])
        ticket = hierarchy.load(run, slots)
        self._turn()
        good = self._finished.pop(ticket).leading_ok
        hierarchy.claims.release(run)
        self._free.extend(slots[good:])
        return slots[:good], tiers[:good]

    def _take_in(self, ids: Sequence[int], keys: Sequence[BlockHash], hit: int, slots: Sequence[int]) -> None:
        """Have the engine's cache follow what was loaded or computed."""
        fresh = ids[hit:]
        for content, slot in zip(fresh, slots, strict=True):
            self._slots[content] = slot
            self._contents[slot] = content
        blocks = [BlockId(slot) for slot in slots]
        before = [keys[place - 1] if place else None for place in range(hit, len(ids))]
        self._policy.insert(blocks, keys[hit:], before)
        self._policy.hold(blocks)

    def _save(self, ids: Sequence[int], keys: Sequence[BlockHash], own: Sequence[bytes], tenant: str) -> None:
        hierarchy = self._hierarchy
        if hierarchy is None:
            return
        found = hierarchy.survey(keys, own, len(ids))
        if not found.missing:
            return
        held = hierarchy.claims.hold(found.readable)
        ticket = hierarchy.save(
            [
                SaveRequest(
                    BlockRecord(
                        key=keys[place],
                        parent=keys[place - 1] if place else None,
                        tokens=own[place],
                        tenant=tenant,
                    ),
                    self._slots[ids[place]],
                )
                for place in found.missing
            ],
            heads_held=True,
        ).ticket_id
        self._turn()
        hierarchy.claims.release(held)
        del self._finished[ticket]

    def _turn(self) -> None:
        """Let everything that is under way end."""
        hierarchy = self._hierarchy
        if hierarchy is None:
            return
        self._poll(hierarchy)
        while self._crew.run():
            self._poll(hierarchy)
        self._poll(hierarchy)

    def _poll(self, hierarchy: HierarchyManager) -> None:
        for finished in hierarchy.poll().finished:
            self._finished[finished.ticket_id] = finished

    def _slots_for(self, count: int, incoming: Sequence[BlockHash], mine: list[int]) -> list[int]:
        """Return ``mine`` and ``count`` more slots; whoever must go for them goes."""
        short = count - len(self._free)
        if short > 0:
            context = PolicyContext(
                tier=CacheTier.HBM,
                wanted_blocks=short,
                used_blocks=len(self._slots),
                capacity_blocks=self._sizes.hbm,
                incoming=incoming,
            )
            victims = self._policy.select_victims(context).victims
            if len(victims) < short:
                raise AssertionError(f"HBM gave {len(victims)} blocks of {short}")
            for slot in victims:
                del self._slots[self._contents.pop(slot)]
                self._free.append(slot)
        taken = self._free[len(self._free) - count :] if count else []
        del self._free[len(self._free) - count :]
        return [*mine, *taken]

    def _count(self, request: Request, hit: int, tiers: Sequence[CacheTier]) -> Tokens:
        def upto(blocks: int) -> int:
            return min(request.block_tokens * blocks, request.prompt_tokens)

        ids, seen = request.block_ids, self._seen
        known = next((place for place, content in enumerate(ids) if content not in seen), len(ids))
        seen.update(ids)
        from_tier = Counter(tiers)
        below = upto(hit + len(tiers)) - upto(hit)
        nvme = min(below, request.block_tokens * from_tier[CacheTier.NVME])
        return Tokens(
            prompt=request.prompt_tokens,
            hbm=upto(hit),
            ddr=below - nvme,
            nvme=nvme,
            again=max(0, upto(known) - upto(hit + len(tiers))),
        )


def serve(
    requests: Iterable[Request], sizes: Sizes, *, policy: str, make_policy: MakePolicy, window: int = 100
) -> Served:
    """Serve all requests, in their order, and return what was found."""
    engine = TracedEngine(sizes, policy=policy, make_policy=make_policy)
    try:
        total, course = Tokens(), [Tokens()]
        for number, request in enumerate(requests):
            if number and number % window == 0:
                course.append(Tokens())
            said = engine.serve(request)
            _add(total, said)
            _add(course[-1], said)
        engine.check_integrity()
        return Served(total=total, tenants=engine.tokens, course=tuple(course), evicted_last=engine.evicted_last)
    finally:
        engine.close()


def _add(total: Tokens, part: Tokens) -> None:
    total.prompt += part.prompt
    total.hbm += part.hbm
    total.ddr += part.ddr
    total.nvme += part.nvme
    total.again += part.again


def _key(content: int) -> BlockHash:
    return BlockHash(content.to_bytes(HASH_BYTES, "little"))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
