"""The bodies of ``/kv/v1/policy``: which policy of each kind an instance runs, and how it is told to run another.

JSON on the wire. Kinds of an LMDeploy instance: ``eviction`` (what leaves HBM), ``eviction:ddr`` and ``eviction:nvme``
(what leaves the tiers below, where there are any) and ``shadow`` (the candidates that are followed beside them).
"""

from typing import Literal

import msgspec

from kvcontrol.core.blocks import CacheTier

POLICY_PATH = "/kv/v1/policy"

PolicyParams = dict[str, str | int | float | bool | None]


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /kv/v1/policy``: from now on run ``name`` with ``params`` for decisions of this ``kind``.

    ``tier`` may name the tier of an ``eviction`` beside its kind; absent, it is HBM. The ``name`` of a ``shadow`` lists
    candidates, like ``lru,mq(lifetime=2),adaptive``; empty is none.
    """

    kind: str
    name: str
    params: PolicyParams = {}
    tier: str | None = None


class AdaptiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an adaptive policy follows: ``weight`` is its choice, ``follows`` the one in force (see its module)."""

    weight: float | None
    """None is infinite."""
    follows: float | None
    hits: int
    lru_hits: int
    behind_blocks: int
    switches: int


class EvictionReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one tier's policy does. Counts are of the instance's life, whichever policy was in charge; ``since_swap`` of
    this one's. ``query`` and ``hit`` are prompt tokens asked for and found in HBM, and blocks found in a tier below.
    """

    tier: CacheTier
    capacity_blocks: int
    resident_blocks: int
    evicted_blocks: int
    unit: Literal["tokens", "blocks"]
    query: int | None
    hit: int
    query_since_swap: int | None
    hit_since_swap: int
    hit_ratio_since_swap: float | None
    swaps: int
    in_charge_s: float
    adaptive: AdaptiveReport | None = None
    """In HBM, where there is one policy; the tiers below have one a tenant."""


class ShadowStandingBody(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate: the share of sampled blocks that it would have found, ever and in the last whole window."""

    policy: str
    lookups: int
    hits: int
    hit_ratio: float | None
    window_hit_ratio: float | None


class ShadowBody(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates on HBM's requests; ``busy_s`` is what all of them took of one core since they are watched."""

    standings: list[ShadowStandingBody]
    window_s: float
    sampled_ratio: float
    requests: int
    skipped_requests: int
    busy_s: float


class PolicyInCharge(msgspec.Struct, frozen=True, kw_only=True):
    """What decides for one kind, and its statistics: of an eviction policy or of the shadows."""

    kind: str
    name: str
    params: PolicyParams
    eviction: EvictionReport | None = None
    shadow: ShadowBody | None = None


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/policy``, and the answer to a change; ``available`` policies by name, each in a few words."""

    policies: list[PolicyInCharge]
    available: dict[str, str]


__all__ = [
    "POLICY_PATH",
    "AdaptiveReport",
    "EvictionReport",
    "PolicyChange",
    "PolicyInCharge",
    "PolicyParams",
    "PolicyReport",
    "ShadowBody",
    "ShadowStandingBody",
]
