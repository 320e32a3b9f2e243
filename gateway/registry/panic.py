"""When too few are left, an instance that is only late is kept in use for longer.

Health checks that time out everywhere at once say something of what all instances share: a busy machine, a network, the
gateway itself. Taking everybody out then makes an outage of a delay. So an instance whose checks have done nothing but
time out is kept while fewer than a share of its peers are well beside it, for twice as many failed checks as otherwise.
The worst, which fail first, go before that. One that refuses connections or answers with an error goes in any case, and
one that never answers goes after that time, so that nobody waits for it without end.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gateway.registry.instance import Instance, InstanceState
from kvcontrol.core.roles import EngineRole

PATIENCE: Final = 2


class Excuse(StrEnum):
    """Why a failed health check does not take an instance out."""

    OWN_LAG = "own_lag"  # the gateway was late itself
    TOO_FEW = "too_few"  # it only timed out, and too few others are well


@dataclass(frozen=True, slots=True, kw_only=True)
class PanicRules:
    """``share`` of an instance's peers, itself among them: below it one is not given up. 0 gives up any."""

    share: float = 0.5

    def keeps(self, late: Instance, everyone: Iterable[Instance]) -> bool:
        """Whether too few would be left without an instance. Peers serve one of its models, and are not on leave."""
        if late.draining:
            return False
        models = {each.id for each in late.models}
        prefills = late.role is EngineRole.PREFILL
        peers = [
            each
            for each in everyone
            if not each.draining
            and (each.role is EngineRole.PREFILL) is prefills
            and any(one.id in models for one in each.models)
        ]
        well = sum(each.state is InstanceState.HEALTHY and each.id != late.id for each in peers)
        return well < self.share * len(peers)
