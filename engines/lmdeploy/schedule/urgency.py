"""Urgency of LMDeploy's sequences, from their requests' headers."""

from typing import Any, Final

from engines.lmdeploy.http.carried import Carried
from engines.requests.urgency import URGENCY, Urgency

CARRIED_URGENCY: Final = Carried("kvgate_urgency", URGENCY)


def urgency_of_sequence(seq: Any) -> Urgency:
    """Return the urgency of LMDeploy's sequence."""
    return CARRIED_URGENCY.of(seq.sampling_param)
