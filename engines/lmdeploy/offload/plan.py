"""The scheduler's half of the connector: what to load for a request, what to save of it, and when a request is over.

Runs on the engine's loop thread between steps, so everything here is dictionary work: the look-up is in this process
and takes about a microsecond a block, which is why it is not the asynchronous one that LMDeploy's interface allows.

A request's blocks are named by one ``PromptChain``. They are saved as its prefill completes them, and the last ones,
which decoding filled, when it ends; always what is missing of the path from the prompt's first block on, those that the
engine found in its own prefix cache included: that closes holes. What is below HBM already costs a look-up and is held
there until the save has ended, so that it is still there then, and heads stay as young as their tails.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.control.guard import Guard
from engines.lmdeploy.trie.tenancy import salt_of_sequence
from kvcontrol.agent import KVAgent, LoadPlan, SavePlan
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import root_hash
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.kv_runtime import BlockRecord, SaveRequest
from kvcontrol.prefix_reuse import PromptChain


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Fill the engine's ``slots`` for a request with the blocks of a plan, place by place."""

    request_id: int
    plan: LoadPlan
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """Save engine blocks; ``logical_ids`` are LMDeploy's names for them, which keep them from reuse.

    ``plan`` holds the rest of their path below HBM until the save has ended.
    """

    save_id: int
    requests: tuple[SaveRequest, ...]
    logical_ids: tuple[int, ...]
    plan: SavePlan


@dataclass(slots=True)
class _Request:
    chain: PromptChain
    tenant: str
    offered_blocks: int = 0
    plan: LoadPlan | None = None
    load_failed: bool = False
    is_reported: bool = False
    """The tiers know of its prompt."""
    is_counted: bool = False
    """A look-up of its prompt was counted: later ones, after a preemption, find what it has computed itself."""
    is_stale: bool = False
    """It began under another identity: its KV has no name any more."""


@dataclass(slots=True)
class OffloadCounters:
    """Totals since the start: loads that ended, by their outcome; saves that were ordered.

    ``tail_saves`` are those of requests that ended with blocks that decoding filled.
    """

    loads: int = 0
    loads_failed: int = 0
    saves: int = 0
    tail_saves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupplyPath:
    """A prompt's blocks up to ``limit``, and whose they are."""

    chain: PromptChain
    tenant: str
    limit: int


class Supply(Protocol):
    """Brings a request's blocks below HBM from elsewhere; the engine's thread. Never raises for what a peer does."""

    def is_for(self, seq: Any) -> bool:
        """Whether a request's prompt was computed elsewhere."""

    def awaits(self, seq: Any, path: SupplyPath, computed_blocks: int) -> bool:
        """Whether blocks of ``path`` after ``computed_blocks`` are still coming; the first call has them brought."""

    def settled(self, seq: Any) -> None:
        """A request's loads are planned: nothing needs to be kept for it any more."""

    def forget(self, request_id: int) -> None:
        """A request is over, or goes on without."""


@dataclass(slots=True)
class OffloadPlanner:
    """Plans loads and saves of one engine's requests under one cache identity."""

    agent: KVAgent
    identity: CacheIdentity
    pin: Callable[[SaveOrder], None]
    """Keeps the blocks of an order from reuse from now on; for blocks whose request ends in this very call."""
    guard: Guard
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    is_open: bool = True
    """Whether anything new is loaded and saved, ever again."""
    is_suspended: bool = False
    """Whether nothing new is loaded and saved for a while."""
    supply: Supply | None = None
    """Who brings blocks of a prompt that another instance has computed."""
    _requests: dict[int, _Request] = field(default_factory=dict)
    _loading: set[int] = field(default_factory=set)
    _new_loads: list[LoadOrder] = field(default_factory=list)
    _tail_saves: list[SaveOrder] = field(default_factory=list)
    _saving: dict[int, SavePlan] = field(default_factory=dict)
    _save_ids: Any = field(default_factory=itertools.count)

    # Loads.

    def external_tokens(self, seq: Any, computed_tokens: int) -> int | None:
        """Return how many tokens beyond ``computed_tokens`` can be loaded from below HBM; 0 for none or not worth it,
        None while blocks are still coming from elsewhere.

        Asked again for the same request, the answer stays while its plan still extends what is computed.
        """
        if not self._takes(seq):
            return 0
        request = self._request(seq)
        if request.load_failed or request.is_stale:
            return 0
        size = self.identity.block_size_tokens
        limit = self._limit(seq)
        first = computed_tokens // size
        if not request.is_reported:
            request.is_reported = True
            request.chain.grow(limit)  # what isn't loaded is saved, which asks for the same hashes
            self.agent.requested(request.chain, limit, request.tenant)
        if request.plan is not None:
            if request.plan.first_block == first:
                return request.plan.last_block * size - computed_tokens
            self._forget_plan(request)
        if limit <= first:
            return 0
        request.chain.grow(limit)
        supply = self.supply if self.supply is not None and self.supply.is_for(seq) else None
        path = SupplyPath(chain=request.chain, tenant=request.tenant, limit=limit)
        if supply is not None and supply.awaits(seq, path, first):
            return None
        request.plan = self.agent.plan_load(
            request.chain, first, limit, whatever_it_costs=supply is not None, counts=not request.is_counted
        )
        request.is_counted = True
        if supply is not None:
            supply.settled(seq)
        return 0 if request.plan is None else request.plan.last_block * size - computed_tokens

    def held_tokens(self, seq: Any, first_tokens: int) -> int:
        """Return how many tokens behind the first ones, whole blocks, a tier has; nothing is planned or counted."""
        if not self._takes(seq):
            return 0
        request = self._request(seq)
        first, limit = first_tokens // self.identity.block_size_tokens, self._limit(seq)
        if request.load_failed or request.is_stale or limit <= first:
            return 0
        request.chain.grow(limit)
        return self.agent.held_blocks(request.chain, first, limit) * self.identity.block_size_tokens

    def allocated(self, seq: Any, slots: Sequence[int]) -> int:
        """Bind a request's plan to the engine's slots, fewer than planned for a shorter load.

        Returns how many of the request's blocks there will be once it has run; 0: it will not run.
        """
        request = self._requests[int(seq.seq_id)]
        if request.plan is None:
            return 0
        plan = self.agent.shorten(request.plan, len(slots))
        request.plan = None
        order = LoadOrder(request_id=int(seq.seq_id), plan=plan, slots=tuple(map(int, slots)))
        self._new_loads.append(order)
        self._loading.add(order.request_id)
        return plan.last_block

    def loaded(self, request_id: int, *, success: bool) -> bool:
        """Note the end of a load and return whether its KV may be used; otherwise its request isn't loaded for again.

        A load that succeeded is of no use to a request whose identity has passed.
        """
        self._loading.discard(request_id)
        request = self._requests.get(request_id)
        usable = success and request is not None and not request.is_stale
        if usable:
            self.counters.loads += 1
            return True
        self.counters.loads_failed += 1
        if request is not None:
            request.load_failed = True
        return False

    # Saves.

    def orders(
        self,
        running: Sequence[Any],
        token_lens: Sequence[int],
        slots: Sequence[Sequence[int]],
        logical_ids: Sequence[Sequence[int]],
    ) -> tuple[list[LoadOrder], list[SaveOrder], list[SaveOrder]]:
        """Return the step's loads, its saves (blocks that this step's prefill completes), and saves of requests that
        have ended since the last step, whose blocks are pinned already.
        """
        saves = []
        for seq, tokens, seq_slots, seq_ids in zip(running, token_lens, slots, logical_ids, strict=False):
            order = self.guard("plan a save", None, self._save, seq, int(tokens), seq_slots, seq_ids)
            if order is not None:
                saves.append(order)
        loads, self._new_loads = self._new_loads, []
        tails, self._tail_saves = self._tail_saves, []
        return loads, saves, tails

    def ended(self, seq: Any, slots: Sequence[int], logical_ids: Sequence[int]) -> None:
        """Forget a request; the full blocks that decoding filled are saved, pinned from here on."""
        try:
            order = self._save(seq, int(seq.num_history_ids), slots, logical_ids) if len(slots) else None
        finally:
            self.forget(int(seq.seq_id))
        if order is None:
            return
        try:
            self.pin(order)
        except BaseException:
            self.saved(order.save_id)
            raise
        self._tail_saves.append(order)
        self.counters.tail_saves += 1

    def saved(self, save_id: int) -> bool:
        """Note the end of a save; False for one that is not under way."""
        plan = self._saving.pop(save_id, None)
        if plan is None:
            return False
        self.guard("release a save", None, self.agent.saved, plan)
        return True

    # All.

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way or waits to be ordered."""
        return not (self._new_loads or self._loading or self._tail_saves or self._saving)

    def arrived(self, seq: Any) -> None:
        """Start afresh for a request id."""
        self.forget(int(seq.seq_id))

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request; a load under way ends by itself."""
        if self.supply is not None:
            self.supply.forget(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forget_plan(request)

    def reset(self) -> None:
        """Forget all that is under way, after the transfers were drained, and saves that were never ordered."""
        self._tail_saves.clear()
        for order in self._new_loads:
            self.agent.release(order.plan)
        self._new_loads.clear()
        self._loading.clear()
        for save_id in list(self._saving):
            self.saved(save_id)
        for request in self._requests.values():
            self._forget_plan(request)

    def rebase(self, identity: CacheIdentity) -> None:
        """Root later requests in another identity; those that began under the old one take no further part."""
        self.identity = identity
        for request_id, request in self._requests.items():
            if self.supply is not None:
                self.supply.forget(request_id)
            self._forget_plan(request)
            request.is_stale = True

    def _request(self, seq: Any) -> _Request:
        request = self._requests.get(int(seq.seq_id))
        if request is None:
            salt = salt_of_sequence(seq)

            def packed(first: int, last: int) -> bytes:
                return bytes(seq.history_cache[first:last].astype("<u4").tobytes())

            chain = PromptChain(
                root_hash(self.identity, salt=salt, adapter=seq.adapter_name or ""),
                block_size_tokens=self.identity.block_size_tokens,
                source=packed,
            )
            request = self._requests[int(seq.seq_id)] = _Request(chain, tenant_of_salt(salt))
        return request

    def _save(self, seq: Any, tokens: int, slots: Sequence[int], logical_ids: Sequence[int]) -> SaveOrder | None:
        if not self._takes(seq):
            return None
        request = self._request(seq)
        if request.is_stale:
            return None
        last = min(tokens // self.identity.block_size_tokens, len(slots), len(logical_ids))
        chain = request.chain
        chain.grow(last)
        done = request.offered_blocks
        request.offered_blocks = max(done, last)
        plan = self.agent.plan_save(chain, done, last) if done < last else None
        if plan is None:
            return None
        keys, tokens_of, tenant = chain.keys, chain.block_tokens, request.tenant
        order = SaveOrder(
            save_id=next(self._save_ids),
            requests=tuple(
                [
                    SaveRequest(
                        BlockRecord(keys[place], keys[place - 1] if place else None, tokens_of[place], tenant),
                        int(slots[place]),
                    )
                    for place in plan.places
                ]
            ),
            logical_ids=tuple([int(logical_ids[place]) for place in plan.places]),
            plan=plan,
        )
        self._saving[order.save_id] = plan
        self.counters.saves += 1
        return order

    def _limit(self, seq: Any) -> int:
        """Return how many blocks of a prompt can be loaded: its last token is computed."""
        return int(seq.clamp_prefix_cache_match_step(seq.get_prefix_cache_max_candidate_step())) // (
            self.identity.block_size_tokens
        )

    def _takes(self, seq: Any) -> bool:
        return self.is_open and not self.is_suspended and _is_plain(seq)

    def _forget_plan(self, request: _Request) -> None:
        if request.plan is not None:
            self.agent.release(request.plan)
            request.plan = None


def _is_plain(seq: Any) -> bool:
    """Whether tokens alone say what a request's KV is; pictures and given embeddings don't take part."""
    return bool(seq.history_multimodals.empty()) and len(seq.history_embeddings) == 0
