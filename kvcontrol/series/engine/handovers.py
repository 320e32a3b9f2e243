"""Prompts that prefill instances hand over to decode instances."""

from typing import Final

from kvcontrol.series.engine.families import counter, gauge
from kvcontrol.series.series import Series, Unit

_HANDS_OVER: Final = "where prefill and decode instances hand prompts over"

HANDOVERS = counter(
    "handovers",
    Unit.REQUESTS,
    "Handovers of prompts by outcome. At the prefill instance: handed_over (to another instance), expired (no instance "
    "fetched the prompt) and released (the client left). At the decode instance: fetched, and recomputed (the fetch "
    "failed).",
    "outcome",
    appears=_HANDS_OVER,
)
HANDOVERS_RECOMPUTED = counter(
    "handovers_recomputed",
    Unit.REQUESTS,
    "Prompts that this instance computed because fetching them from another instance failed, by reason.",
    "reason",
    appears=f"{_HANDS_OVER}, after the first",
)
HANDOVER_BYTES = counter(
    "handover_bytes", Unit.BYTES, "Bytes of KV received from other instances.", appears=_HANDS_OVER
)
HANDOVER_SECONDS = counter(
    "handover_seconds",
    Unit.SECONDS,
    "Time that requests waited for KV from other instances, failed fetches included.",
    appears=_HANDS_OVER,
)
HELD_PROMPTS = gauge("held_prompts", Unit.REQUESTS, "Computed prompts that wait to be fetched.", appears=_HANDS_OVER)
HELD_BLOCKS = gauge(
    "held_blocks", Unit.BLOCKS, "KV blocks of computed prompts that wait to be fetched.", appears=_HANDS_OVER
)

ALL_HANDOVERS: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
