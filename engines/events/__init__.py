"""KV events of any engine: the numbered log of its resident blocks, and the thread that publishes it."""

__all__: list[str] = []
