"""Health checks and circuit breakers: when an instance is out of use, and when it returns."""

from typing import Literal

from pydantic import Field

from gateway.settings.section import Seconds, Section


class HealthSettings(Section):
    """Health checks and circuit breakers: when an instance is out of use, and when it returns."""

    health_interval_s: Seconds = Field(1.0, description="Pause between two health checks of an instance, in seconds.")
    health_timeout_s: Seconds = Field(5.0, description="Longest time for a health check, in seconds.")
    breaker_failures: int = Field(
        5, ge=1, le=1000, description="Consecutive failures that open the circuit breaker of an instance."
    )
    breaker_pause_s: Seconds = Field(
        1.0,
        description="First time that an open circuit breaker stays open, in seconds; "
        "it doubles up to 30 s with each failed trial.",
    )
    unhealthy_after: int = Field(
        3, ge=1, le=100, description="Consecutive failed health checks after which an instance is out of use."
    )
    panic_threshold: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of healthy instances below which instances whose health checks only time out "
        "stay in use twice as long.",
    )
    model_memory_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="How long a model whose instance has left gets 503 instead of 404, in seconds.",
    )
    isolation: Literal["allow", "strict"] = Field(
        "allow",
        description="Whether an engine that keeps no tenants' cached prefixes apart is used (and warned of) where "
        "there are several tenants, or not.",
    )
