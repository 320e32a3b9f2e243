"""kvgate's KV connector: LMDeploy's two-sided interface over one runtime in the engine process.

LMDeploy builds a worker (beside the model) and a scheduler (beside the paging), calls them in turn on its loop thread
and gives up the whole engine when one raises. So every method here is guarded: what fails is counted, logged and turned
into the answer that means "nothing": no hit, no save, a failed load, which LMDeploy answers by computing.

Order within one step, and what it protects:

    scheduler  build_connector_meta   orders this step's loads and saves; LMDeploy pins the blocks of saves
    worker     start_load_kv          a step that computes prompt tokens waits, on the device, for loads that count as
                                      ended while their last bytes are under way; loads start once all work queued
                                      before them is done: a block that was just taken from a finished sequence may
                                      still be written by a forward already queued
    worker     start_save_kv          saves start once this step's forward is done
    worker     get_finished           what ended since the last step; a step without a forward waits here for a transfer
                                      to end, but no longer than a moment, instead of spinning through LMDeploy's loop
                                      and taking the GIL from the transfers
    scheduler  update_connector_output
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmdeploy.pytorch.kv_connector.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorResult,
    KVConnectorRole,
    KVConnectorStepInput,
    KVLoadResult,
    KVSaveBlockLease,
)

from engines.lmdeploy.offload.plan import LoadOrder, SaveOrder
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.offload.transfers import Ended

IDLE_WAIT_S = 0.002
"""What a step without a forward waits at most for transfers; one that ends sooner is told at once."""


@dataclass
class OffloadMetadata(KVConnectorMetadata):
    """One step's orders; ``tails`` belong to requests that have ended, their blocks are pinned already.

    ``has_prompt``: the step computes prompt tokens, so it may read what was loaded.
    """

    loads: Sequence[LoadOrder]
    saves: Sequence[SaveOrder]
    tails: Sequence[SaveOrder]
    has_prompt: bool = False

    def get_save_block_leases(self) -> tuple[KVSaveBlockLease, ...]:
        """See LMDeploy."""
        return tuple(KVSaveBlockLease(order.save_id, order.logical_ids) for order in self.saves)


_NOTHING = OffloadMetadata((), (), ())


class OffloadConnector(KVConnectorBase):
    """Either half, by ``role``; both share the engine's ``EngineTiers``, which does the work once it is started."""

    def __init__(self, role: KVConnectorRole, tiers: EngineTiers) -> None:
        super().__init__(role)
        self._tiers = tiers
        self._guard = tiers.guard
        self._had_forward = False

    # The worker's half.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Not guarded: an engine whose pool can't be read starts without tiers or not at all, but never silently."""
        self._tiers.register(kv_caches)

    def start_load_kv(self) -> None:
        orders = self._guard("read a step's orders", _NOTHING, self._orders)
        self._had_forward = False
        if orders.has_prompt:
            self._guard("join loads", None, self._tiers.transfers.join)
        self._guard("start loads", None, self._tiers.transfers.start_loads, orders.loads)
        self._guard("start saves of ended requests", None, self._tiers.transfers.start_saves, orders.tails)

    def start_save_kv(self) -> None:
        orders = self._guard("read a step's orders", _NOTHING, self._orders)
        self._had_forward = True
        self._guard("start saves", None, self._tiers.transfers.start_saves, orders.saves)

    def get_finished(self) -> KVConnectorOutput:
        wait_s = 0.0 if self._had_forward else IDLE_WAIT_S
        ended = self._guard("collect transfers", Ended(), self._tiers.transfers.collect, wait_s)
        return KVConnectorOutput(
            completed_save_ids=ended.saves or None,
            finished_receiving=ended.loads or None,
            invalid_block_ids=ended.invalid_slots,
        )

    def shutdown(self) -> None:
        self._guard("shut down", None, self._tiers.unregister)

    def _orders(self) -> OffloadMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, OffloadMetadata):
            raise TypeError(f"foreign connector metadata: {type(metadata).__name__}")
        return metadata

    # The scheduler's half.

    def on_new_request(self, request: Any) -> None:
        self._guard("note a request", None, self._tiers.requests.arrived, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        nothing: int | None = 0
        tokens = self._guard(
            "look up", nothing, self._tiers.requests.external_tokens, request, int(num_computed_tokens)
        )
        return tokens, bool(tokens)

    def cancel_lookup(self, request_id: Any) -> None:
        self._guard("cancel a look-up", None, self._tiers.requests.lookup_cancelled, int(request_id))

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._tiers.requests.allocated(request, block_ids)

    def build_connector_meta(self, step_input: KVConnectorStepInput) -> KVConnectorMetadata | None:
        return self._guard("order transfers", None, self._metadata, step_input)

    def _metadata(self, step: KVConnectorStepInput) -> OffloadMetadata | None:
        planner = self._tiers.planner
        if planner is None:
            return None
        loads, saves, tails = planner.orders(
            step.running if step.connector_token_lens else (),
            step.connector_token_lens,
            step.connector_block_ids,
            step.connector_logical_block_ids,
        )
        has_prompt = bool(step.connector_token_lens)  # to be measured, also where there is nothing to move
        if not (loads or saves or tails or has_prompt) and planner.is_idle and not self._tiers.transfers.is_busy:
            return None
        self._tiers.steps.ordered(step.running, step.connector_token_lens)
        return OffloadMetadata(loads, saves, tails, has_prompt=has_prompt)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> KVConnectorResult:
        self._guard("measure a step", None, self._tiers.step_ended)
        return self._guard("note ended transfers", KVConnectorResult(), self._result, connector_output)

    def _result(self, output: KVConnectorOutput) -> KVConnectorResult:
        return KVConnectorResult(
            load_results=tuple(
                KVLoadResult(request_id, success)
                for request_id, success in self._tiers.requests.loads_ended(
                    output.finished_receiving or (), output.invalid_block_ids
                )
            ),
            completed_save_ids=self._tiers.requests.saves_ended(output.completed_save_ids or ()),
        )

    def request_finished(self, request: Any) -> None:
        self._guard("end a request", None, self._tiers.requests.ended, request)

    def finish_transfers_after_worker_drain(self) -> None:
        self._guard("forget drained transfers", None, self._tiers.drained)
