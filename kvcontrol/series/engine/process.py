"""The engine process, its resident blocks and its events."""

from typing import Final

from kvcontrol.series.engine.families import counter, gauge
from kvcontrol.series.gateway import LAG_SECONDS
from kvcontrol.series.series import Kind, Series, Unit

UP = gauge("up", Unit.STATE, "1 when the engine process answers; at 0 all other metrics of kvgate are absent.")
RESIDENT_BLOCKS = gauge(
    "resident_blocks", Unit.BLOCKS, "KV blocks that later requests can reuse.", "tier", appears="with the first block"
)
PINNED_BLOCKS = gauge("pinned_blocks", Unit.BLOCKS, "KV blocks of pinned prefixes that a tier holds.", "tier")
KV_EVENTS = counter("kv_events", Unit.BLOCKS, "KV events recorded: stored, removed, cleared.", "kind")
KV_EVENTS_SEQ = gauge(
    "kv_events_seq", Unit.COUNT, "Sequence number of the last published event batch, -1 before the first."
)
KV_EVENTS_DROPPED = counter("kv_events_dropped", Unit.COUNT, "KV events dropped because the queue was full.")
KV_EVENTS_RESYNCS = counter("kv_events_resyncs", Unit.COUNT, "Full snapshots published again.")
HOOK_ERRORS = counter("hook_errors", Unit.COUNT, "Changes of the block trie that failed to become KV events.")
EVICTION_ERRORS = counter(
    "eviction_errors", Unit.COUNT, "1 when the eviction policy failed and LMDeploy's own eviction replaced it."
)
PUBLISHER_ERRORS = counter("publisher_errors", Unit.COUNT, "Failed rounds of the event publisher.")
LOOP_LAG = Series(
    name="kvgate_engine_event_loop_lag_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Event-loop lag of the instance's processes: the api_server's and the engine's.",
    labels=("process",),
    buckets=LAG_SECONDS,
)
TRACE_SPANS = counter(
    "trace_spans",
    Unit.COUNT,
    "Ended spans: exported, failed (the collector refused them), or dropped (the export queue was full).",
    "outcome",
    appears="with tracing",
)

PROCESS: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
