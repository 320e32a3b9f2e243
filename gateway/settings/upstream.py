"""How long the gateway waits for an instance, and when it tries another one."""

from pydantic import Field

from gateway.settings.section import Seconds, Section


class UpstreamSettings(Section):
    """How long the gateway waits for an instance, and when it tries another one."""

    connect_timeout_s: Seconds = Field(5.0, description="Longest time to connect to an instance, in seconds.")
    first_byte_timeout_s: Seconds = Field(
        600.0, description="Longest wait for the first byte of an instance's answer (queue and prefill), in seconds."
    )
    idle_timeout_s: Seconds = Field(120.0, description="Longest time without a byte within an answer, in seconds.")
    stream_ping_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Time without an event after which a stream's client receives a comment "
        "(Messages: a ping), in seconds; 0: never.",
    )
    max_attempts: int = Field(3, ge=1, le=16, description="Maximum number of instances that one request is tried on.")
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="Retries allowed per request on average, so that an outage is not multiplied."
    )
