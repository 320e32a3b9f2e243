"""KV events of any engine: the numbered log of what its cache holds, and the thread that publishes it."""

__all__: list[str] = []
