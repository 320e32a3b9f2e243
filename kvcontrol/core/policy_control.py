"""The bodies of ``/kv/v1/policy``: which policy of each kind an instance runs, and how it is told to run another.

JSON on the wire. Kinds of an LMDeploy instance: ``eviction`` (what leaves HBM), ``eviction:ddr`` and ``eviction:nvme``
(what leaves the tiers below, where there are any), ``shadow`` (the candidates that are followed beside them),
``schedule`` (which of the waiting requests goes next) and ``pace`` (whether the next step computes prompts or tokens).
"""

from typing import Annotated, Literal

import msgspec

from kvcontrol.core.blocks import CacheTier

POLICY_PATH = "/kv/v1/policy"

PolicyParams = dict[str, str | int | float | bool | None]

_Name = Annotated[str, msgspec.Meta(max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


MOST_FENCE = (1 << 53) - 1
"""The highest number of a fence."""
FENCE_LEAP = 1 << 32
"""No store issues so many fences while an instance runs: a number that is further ahead was invented."""


class Fence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Orders the changes of one store's gateways: a change with a lower ``number`` is older."""

    store: _Name
    number: Annotated[int, msgspec.Meta(ge=0, le=MOST_FENCE)]


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``PUT /kv/v1/policy``: from now on run ``name`` with ``params`` for decisions of this ``kind``.

    ``tier`` may name the tier of an ``eviction`` beside its kind; absent, it is HBM. The ``name`` of a ``shadow`` lists
    candidates, like ``lru,mq(lifetime=2),adaptive``; empty is none. Characters are limited, as refusals repeat them: 64
    of a kind, a tier or a parameter's name, 1,024 of a name or a value.

    A change whose ``fence`` is older than one that came for this kind from the same store is refused with 409. A change
    without a fence is always carried out.
    """

    kind: _Name
    name: _Text
    params: dict[_Name, _Text | int | float | bool | None] = {}
    tier: _Name | None = None
    fence: Fence | None = None


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


WAIT_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends of the buckets in ``ClassWaits.buckets``; one more holds the rest."""


class ClassWaits(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class: how many wait now; since the instance started how many were started, and how many left before
    that; how long the started ones had waited, in all, at most, and by ``WAIT_BUCKETS_S`` (each bucket alone).
    """

    waiting: int
    started: int
    left: int
    wait_s: float
    longest_wait_s: float
    buckets: list[int]


class ScheduleReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the waiting queue does; counts are of the instance's life, whichever strategy was in charge.

    ``oldest_s`` is how long the one that waits longest has waited, ``window`` how many the engine is shown at a step.
    ``promotions`` are requests that were started for their age, ``returned`` those that came back (preempted, or loaded
    from a tier). ``state`` is what an adaptive strategy follows. ``errors`` other than 0 is a defect: from the first on
    LMDeploy's own order is in charge, until the next swap. ``repairs`` counts queues that were built anew.
    """

    waiting: int
    oldest_s: float
    window: int
    ageing_bound_s: float
    promotions: int
    returned: int
    classes: dict[str, ClassWaits]
    swaps: int
    in_charge_s: float
    state: str
    errors: int
    repairs: int


class PaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the pace of the engine's steps does; ``decisions`` are steps by reason since the instance started.

    ``target_s`` 0 is no target. ``decode_s`` is what a decode step takes as measured (None before the first),
    ``chunk_tokens`` what a prompt's chunk has at most beside answers and ``chunk_s`` what it takes, ``debt`` the decode
    steps that are owed now. ``unmet`` says what keeps the target from being kept, if anything does. ``errors`` other
    than 0 is a defect: from the first on LMDeploy's own rule is in charge, until the next swap. ``overtook`` counts
    prompts that were computed before the rest of a longer one, ``gave_way`` those of them that found no room.
    """

    target_s: float
    decode_s: float | None
    chunk_tokens: int
    chunk_s: float | None
    debt: int
    decisions: dict[str, int]
    unmet: str
    swaps: int
    in_charge_s: float
    errors: int
    overtook: int = 0
    gave_way: int = 0


class PolicyInCharge(msgspec.Struct, frozen=True, kw_only=True):
    """What decides for one kind, and its statistics: of an eviction policy, of the shadows, of the waiting queue,
    of the steps.

    ``params`` are those that somebody set; ``effective_params`` all that an eviction policy has, defaults among them.
    """

    kind: str
    name: str
    params: PolicyParams
    effective_params: PolicyParams = {}
    eviction: EvictionReport | None = None
    shadow: ShadowBody | None = None
    schedule: ScheduleReport | None = None
    pace: PaceReport | None = None


class FirstPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of a kind before its first change."""

    name: str
    params: PolicyParams


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/policy``, and the answer to a change; ``available`` eviction policies, ``strategies`` of the
    schedule and ``paces`` by name, each in a few words. ``fences`` has the newest number that came, by kind and store;
    ``first`` the policy with which the instance was started, by kind, for each kind that was changed since.
    """

    policies: list[PolicyInCharge]
    available: dict[str, str]
    strategies: dict[str, str] = {}
    paces: dict[str, str] = {}
    fences: dict[str, dict[str, int]] = {}
    first: dict[str, FirstPolicy] = {}
