"""A hybrid instance's handover through the tiers: lends saved blocks, and borrows blocks of other instances.

Any such instance may do both; which of them prefills for whom is the gateway's affair.
"""

from hashlib import blake2b
from importlib.metadata import version

from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.pd.borrower import PdBorrower
from engines.lmdeploy.pd.lender import PdLender
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.server import PdServer
from engines.lmdeploy.pd.transport import endpoint_of
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.pd import PdStats


class PdTiers:
    """Lends and borrows until ``close``; for tiers that were started. Raises ``OSError``."""

    def __init__(self, tiers: EngineTiers, settings: EngineSettings, calls: EngineCalls) -> None:
        if tiers.planner is None or tiers.memory is None:
            raise RuntimeError("the tiers were not started")
        self.layout = _layout(tiers.memory.layout, tiers.memory.block_bytes)
        peers, timeout_s = Peers(settings.pd_networks), settings.pd_transfer_timeout_s
        self._borrower = PdBorrower(tiers, peers, layout=self.layout, timeout_s=timeout_s)
        self._lender = PdLender(tiers, calls, layout=self.layout, wait_s=timeout_s / 2)
        self._server = PdServer(
            self._lender.serve, peers, host=settings.pd_host, port=settings.pd_port, timeout_s=timeout_s
        )
        self._endpoint = endpoint_of(settings, self._server.port)
        tiers.planner.supply = self._borrower
        self._server.start()

    def stats(self) -> PdStats:
        """Return totals; any thread, values may be a step apart."""
        borrower = self._borrower
        return PdStats(
            endpoint=self._endpoint,
            handed_over=self._lender.handed_over,
            fetched=borrower.fetched,
            fetched_bytes=borrower.fetched_bytes,
            recomputed=dict(borrower.recomputed),
            transfer_s=borrower.transfer_s,
        )

    def close(self) -> None:
        self._server.close()
        self._borrower.close()


def _layout(layout: str, block_bytes: int) -> str:
    """What must be equal for another process to use the bytes of a block, beside its hash, as a short text."""
    digest = blake2b(digest_size=8, person=b"kvgate.exchange")
    for part in (version("lmdeploy"), layout, str(block_bytes)):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()
