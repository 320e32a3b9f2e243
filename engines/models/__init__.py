"""Models that need no hub: a tiny random Llama made on the spot, and SmolLM2 out of a PyPI wheel."""

__all__: list[str] = []
