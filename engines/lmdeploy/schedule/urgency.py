"""How urgent LMDeploy's sequence is, as its request's headers say."""

from typing import Any, Final

from engines.lmdeploy.http.carried import Carried
from engines.requests.urgency import URGENCY, Urgency

CARRIED_URGENCY: Final = Carried("kvgate_urgency", URGENCY)


def urgency_of_sequence(seq: Any) -> Urgency:
    """Return what LMDeploy's sequence was sent with."""
    return CARRIED_URGENCY.of(seq.sampling_param)


__all__ = ["CARRIED_URGENCY", "urgency_of_sequence"]
