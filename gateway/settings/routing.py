"""Settings of routing, and assumed speeds of instances until they are measured."""

from typing import Literal

from pydantic import Field

from gateway.settings.section import Section


class RoutingSettings(Section):
    """How an instance is chosen, and what is assumed of instances until it is measured."""

    routing_policy: Literal["cost_aware", "prefix_affinity", "consistent_hash", "least_load", "round_robin"] = Field(
        "cost_aware", description="Policy that chooses the instance of a request."
    )
    prefill_tokens_per_s: float = Field(
        2000.0, gt=0, description="Prefill speed of an instance in tokens per second, assumed until measured."
    )
    decode_load_s: float = Field(
        0.02,
        ge=0,
        description="Delay that each running request adds to a new one, in seconds, assumed until measured.",
    )
    routing_spread: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Share of the uncached work that an instance got lately which counts against it in its cost.",
    )
    learned_capacity_tokens: int = Field(
        1 << 20,
        ge=1024,
        le=1 << 32,
        description="Assumed cache size of an engine without KV events, in tokens, until its answers show another.",
    )
    route_memory_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="How long a routing decision attracts equal prefixes before KV events confirm it, in seconds.",
    )
    session_memory_s: float = Field(
        3600.0,
        ge=0,
        le=86_400,
        description="How long a prompt without KV events attracts later requests of its conversation, in seconds.",
    )
