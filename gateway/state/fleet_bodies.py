"""Instances and routing as they are stored and as ``/admin/v1`` takes them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PolicyName = Literal["cost_aware", "prefix_affinity", "consistent_hash", "least_load", "round_robin"]
ROUTING_NAME = "fleet"
"""Name of the only routing document."""

Url = Annotated[str, Field(min_length=1, max_length=512, description="Where its HTTP server listens: an origin.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceBody(_Body):
    """What an operator says of an instance. Without ``url`` it is one that the settings or a discovery name."""

    url: Url | None = Field(None, description="Where its HTTP server listens; null for one that is named elsewhere.")
    draining: bool = Field(default=False, strict=True, description="Whether it is given nothing new.")


class RoutingBody(_Body):
    """How instances are chosen. Null is what the settings say."""

    policy: PolicyName
    prefill_tokens_per_s: float | None = Field(None, gt=0, le=1e9, description="Prefill speed until it is measured.")
    decode_load_s: float | None = Field(
        None, ge=0, le=3600, description="Delay of each running request until it is measured, in seconds."
    )
    spread: float | None = Field(
        None, ge=0, le=10, description="Share of the uncached work that an instance got lately which counts against it."
    )


__all__ = ["ROUTING_NAME", "InstanceBody", "PolicyName", "RoutingBody"]
