"""Instances, routing and pins as they are stored, and as ``/admin/v1`` takes them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.roles import EngineRole

PolicyName = Literal["cost_aware", "prefix_affinity", "consistent_hash", "least_load", "round_robin"]
ROUTING_NAME = "fleet"
"""Name of the only routing document."""

_HASH_DIGITS = 2 * HASH_BYTES

Url = Annotated[str, Field(min_length=1, max_length=512, description="Where its HTTP server listens: an origin.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InstanceBody(_Body):
    """An operator's document of an instance. Without ``url`` the settings or a discovery name the instance."""

    url: Url | None = Field(None, description="Where its HTTP server listens; null for one that is named elsewhere.")
    draining: bool = Field(default=False, strict=True, description="Whether it receives no new requests.")
    role: EngineRole | None = Field(
        None, description="Role where prompts go through the tiers; null: from its name or its own report."
    )


class RoutingBody(_Body):
    """The routing policy. Null is the value of the settings."""

    policy: PolicyName
    prefill_tokens_per_s: float | None = Field(None, gt=0, le=1e9, description="Prefill speed until it is measured.")
    decode_load_s: float | None = Field(
        None, ge=0, le=3600, description="Delay of each running request until it is measured, in seconds."
    )
    spread: float | None = Field(
        None, ge=0, le=10, description="Share of the uncached work that an instance got lately which counts against it."
    )


class PinBody(_Body):
    """A pinned prefix: no text and no tokens, the names of its blocks.

    ``chains`` has the hex hashes of its blocks in prompt order, concatenated, for each layout of block names.
    ``tokens`` counts the tokens of its blocks.
    """

    model: str
    tenant: str
    note: str = ""
    tokens: int
    chains: dict[str, str]
    instances: tuple[str, ...]
    expires_at_s: float | None = None

    def chain(self, layout: str) -> tuple[str, ...]:
        """Return the hashes for one layout, none where it is unknown."""
        text = self.chains.get(layout, "")
        return tuple(text[start : start + _HASH_DIGITS] for start in range(0, len(text), _HASH_DIGITS))
