"""The KV control plane library: what a KV block is, who holds it, and what to do about it."""

__all__: list[str] = []
