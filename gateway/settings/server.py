"""Settings of the server: address, bounds of connections, and shutdown."""

from pydantic import Field

from gateway.settings.section import Seconds, Section


class ServerSettings(Section):
    """The address that the gateway listens on, what it accepts of connections, and how it stops."""

    host: str = Field("127.0.0.1", description="Address to listen on. Without API keys only a loopback one is allowed.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0 picks a free one.")
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the address, one for each core; more than one needs redis_url.",
    )
    max_header_bytes: int = Field(
        64 << 10, ge=4096, le=1 << 24, description="Longest request line and headers together, in bytes."
    )
    header_timeout_s: Seconds = Field(
        20.0, description="Longest time for a client to send a request's line and headers, in seconds."
    )
    keep_alive_timeout_s: Seconds = Field(
        75.0,
        description="Time that an idle connection of a client is kept, in whole seconds: longer than a load balancer "
        "keeps its own, mostly 60 s.",
    )
    send_timeout_s: Seconds = Field(
        60.0, description="Longest time for a client to take a chunk of its answer, in seconds."
    )
    shutdown_notice_s: float = Field(
        1.0,
        ge=0,
        le=86_400,
        description="Time after a stop signal in which requests are still served while /readyz is 503, in seconds; "
        "then new connections are refused.",
    )
    shutdown_grace_s: Seconds = Field(
        10.0, description="Time for running requests to end after a stop signal, in seconds."
    )
