"""Settings of durable and shared state."""

import os
from pathlib import Path

from pydantic import Field, SecretStr

from gateway.settings.section import Seconds, Section


def _default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvgate"


class StateSettings(Section):
    """Where the gateway keeps what survives a restart, and what several gateways share."""

    state_dir: Path = Field(default_factory=_default_state_dir, description="Folder for durable state.")
    store_url: SecretStr | None = Field(
        None,
        description="PostgreSQL for what several hosts share (postgresql://...); otherwise SQLite in state_dir.",
    )
    store_poll_s: Seconds = Field(
        1.0, description="Interval at which a gateway polls the store for changes by other gateways, in seconds."
    )
    store_timeout_s: Seconds = Field(
        5.0,
        description="Longest wait of a request's calls to the store together, and longest time for one call itself, in "
        "seconds; then its connection is cut and nothing was changed.",
    )
    store_trust_s: Seconds = Field(
        3600.0,
        description="How long stored keys are accepted while the store can't be read, in seconds; then they are "
        "answered 503. Keys of the settings are always accepted.",
    )
    operation_lease_s: Seconds = Field(
        5.0,
        ge=1,
        description="How long a change of instances (a swap, a preset, a pin) stays begun without a sign of its "
        "gateway, in seconds; then another gateway undoes it. Other swaps and presets are refused until then. Keep it "
        "above the time for which a gateway or the database may stand still.",
    )
    audit_entries: int = Field(100_000, ge=1, le=10**9, description="Newest entries of the audit log that are kept.")
    audit_days: float = Field(365.0, gt=0, le=36_500, description="Days that an entry of the audit log is kept.")
    redis_url: SecretStr | None = Field(
        None,
        description="Redis or Valkey for quotas and leases that gateways share (redis://host:port/0); "
        "without it, each has its own.",
    )
