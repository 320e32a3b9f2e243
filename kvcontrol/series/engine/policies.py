"""Eviction policies and shadow policies."""

from typing import Final

from kvcontrol.series.engine.families import counter, gauge
from kvcontrol.series.series import Kind, Series, Unit

_POLICIES: Final = "from the engine process's first reply on"
_ADAPTIVE: Final = "while `adaptive` is the policy of HBM"
_SHADOWS: Final = "while shadow policies run"
_ANEW: Final = "restarts at 0 when the list of shadow policies changes"

POLICY_SWAPS = Series(
    name="kv_policy_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Policy swaps in the running instance.",
    labels=("kind", "tier"),
    appears=_POLICIES,
)
POLICY_REFUSED = Series(
    name="kv_policy_refused_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Policy swaps that were refused.",
    appears=_POLICIES,
)
POLICY_EVICTED = counter(
    "policy_evicted_blocks", Unit.BLOCKS, "Eviction victims chosen by a policy.", "tier", appears=_POLICIES
)
POLICY_IN_CHARGE = gauge(
    "policy_in_charge",
    Unit.STATE,
    "1 for the policy that chooses a tier's eviction victims; `lmdeploy` after an error of the policy.",
    "tier",
    "policy",
    appears=_POLICIES,
)
PREFIX_QUERY = counter("prefix_query_tokens", Unit.TOKENS, "Prompt tokens looked up in HBM.", appears=_POLICIES)
PREFIX_HIT = counter("prefix_hit_tokens", Unit.TOKENS, "Looked-up prompt tokens found in HBM.", appears=_POLICIES)
ADAPTIVE_WEIGHT = gauge(
    "adaptive_weight",
    Unit.COUNT,
    "Factor by which blocks that were reused age more slowly; 1 is LRU.",
    appears=_ADAPTIVE,
)
ADAPTIVE_HITS = counter(
    "adaptive_hits", Unit.TOKENS, "Prompt tokens found, counted by the guard of `adaptive`.", appears=_ADAPTIVE
)
ADAPTIVE_LRU_HITS = counter(
    "adaptive_lru_hits",
    Unit.TOKENS,
    "Prompt tokens that an LRU cache of the same size would have found.",
    appears=_ADAPTIVE,
)
ADAPTIVE_SWITCHES = counter("adaptive_switches", Unit.COUNT, "Changes of the weight of `adaptive`.", appears=_ADAPTIVE)
SHADOW_LOOKUPS = counter(
    "shadow_lookups",
    Unit.BLOCKS,
    f"Sampled blocks looked up in a shadow policy's cache; {_ANEW}.",
    "policy",
    appears=_SHADOWS,
)
SHADOW_HITS = counter(
    "shadow_hits", Unit.BLOCKS, f"Sampled blocks found in a shadow policy's cache; {_ANEW}.", "policy", appears=_SHADOWS
)
SHADOW_RATIO = gauge(
    "shadow_hit_ratio",
    Unit.RATIO,
    "Hit ratio of a shadow policy in the last complete window.",
    "policy",
    appears=f"{_SHADOWS}, after the first whole minute with look-ups",
)
SHADOW_REQUESTS = counter(
    "shadow_requests", Unit.REQUESTS, f"Requests replayed in the shadow policies; {_ANEW}.", appears=_SHADOWS
)
SHADOW_SKIPPED = counter(
    "shadow_skipped",
    Unit.COUNT,
    f"Requests and stores that the shadow policies skipped to stay below 1 % of a core; {_ANEW}.",
    appears=_SHADOWS,
)
SHADOW_BUSY = counter(
    "shadow_busy_seconds",
    Unit.SECONDS,
    f"Time of the engine's thread spent in shadow policies; {_ANEW}.",
    appears=_SHADOWS,
)

POLICIES: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
