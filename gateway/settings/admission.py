"""Queues in front of the instances, and how many requests an instance gets at once."""

from pydantic import Field

from gateway.settings.section import Seconds, Section


class AdmissionSettings(Section):
    """Queues in front of the instances, and how many requests an instance gets at once."""

    queue_length: int = Field(1024, ge=0, le=1 << 16, description="Maximum number of queued requests for one model.")
    queue_ageing_s: Seconds = Field(
        10.0, description="Waiting time that raises a request by one priority class, in seconds."
    )
    queue_interactive_s: Seconds = Field(10.0, description="Longest wait of the SLO class interactive, in seconds.")
    queue_standard_s: Seconds = Field(60.0, description="Longest wait of the SLO class standard, in seconds.")
    queue_batch_s: Seconds = Field(600.0, description="Longest wait of the SLO class batch, in seconds.")
    max_instance_requests: int = Field(
        4096,
        ge=1,
        le=1 << 16,
        description="Upper bound of the concurrency limit of one instance; the limit adapts "
        "to what the instance can take.",
    )
    slow_first_byte_s: Seconds = Field(
        60.0, description="Time to first byte above which the concurrency limit of the instance is lowered, in seconds."
    )
