"""The KV tiers below an LMDeploy engine: its connector, what is saved and loaded when, and the memory of its pool."""

__all__: list[str] = []
