"""What of a planned fleet this machine can run live: so many of its instances, with that part of its load."""

from typing import Final

import psutil

from kvgate.failure import CommandError
from kvgate.host.machine import core_count
from lab.simulate.live import Slice, told, within
from lab.simulate.study import Study
from lab.simulate.workload import Workload

_ENGINE_BYTES: Final = 400 << 20
"""Memory of one simulated engine's process and its share of the gateway's, generously."""
_TOKENS_PER_CORE_S: Final = 600.0
"""Streamed tokens that a core carries through engine, gateway and client, on a slow machine."""


def slice_of(study: Study, workload: Workload, seconds: float) -> Slice:
    """Return what of a fleet this machine can carry for so long. ``workload`` is what the fleet is to serve; a part of
    it gets one copy, slowed down. Raises ``CommandError`` where nothing is left.
    """
    share = _most_instances(study, workload) / study.instances
    speed = workload.copies * workload.speed * share
    fitting = within(study.profile.engine.context_tokens, workload)
    chosen = [each for each in fitting if (each.at_s - fitting[0].at_s) / speed < seconds]
    if not chosen:
        raise CommandError("--check: no request of the trace fits the profile's context")
    return Slice(
        instances=round(share * study.instances), fleet=study.instances, requests=chosen, speed=speed, seconds=seconds
    )


def _most_instances(study: Study, workload: Workload) -> int:
    """How many of the instances this machine carries: by its cores, its memory, and the tokens that they stream."""
    answers = sum(told(each, workload).output_tokens or 1 for each in workload.requests)
    a_second = answers * workload.copies / max(1.0, workload.lasts_s) / study.instances
    by_tokens = int(core_count() * _TOKENS_PER_CORE_S / max(1e-9, a_second))
    by_memory = psutil.virtual_memory().available // _ENGINE_BYTES
    return max(1, min(study.instances, core_count(), by_tokens, by_memory))
