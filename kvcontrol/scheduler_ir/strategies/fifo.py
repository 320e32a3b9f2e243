"""First come, first served: what LMDeploy does, and what every other strategy is compared with.

    rank = 0, so that the order of arrival decides

Nobody is passed, so nobody ages. It is the fairest to requests and the unfairest to short and urgent ones: one burst of
long prompts holds up whoever comes behind it.

Source: Erlang's queue; in LLM serving Orca (Yu et al., OSDI 2022, section 4.1: "iteration-level first-come-first-
served").
"""

from kvcontrol.scheduler_ir.strategies.base import WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import RankedOrder


class FifoOrder(RankedOrder):
    """By arrival."""

    name = "fifo"

    def _rank(self, request: WaitingRequest) -> float:
        del request
        return 0.0


__all__ = ["FifoOrder"]
