"""Separation of prefill and decode: from which prompt on, over which transport, with which limits."""

from pydantic import Field

from gateway.settings.section import Section
from kvcontrol.core.roles import KVTransport


class SeparationSettings(Section):
    """Separation of prefill and decode: from which prompt on, over which transport, with which limits."""

    pd_min_uncached_tokens: int = Field(
        1024,
        ge=1,
        le=1 << 30,
        description="Uncached tokens of a prompt from which on a prefill instance computes it.",
    )
    pd_transports: tuple[KVTransport, ...] = Field(
        tuple(KVTransport),
        description="Transports of KV from prefill to decode instances; the first one "
        "that both instances have is used.",
    )
    prefill_max_requests: int = Field(
        0, ge=0, le=1 << 16, description="Prompts that one prefill instance computes at once; 0: no limit."
    )
    prefill_max_tokens: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="Uncached tokens that one prefill instance computes at once, one longer prompt aside; 0: no limit.",
    )
    decode_max_requests: int = Field(
        0, ge=0, le=1 << 16, description="Requests that one decode instance has at once; 0: no limit of its own."
    )
