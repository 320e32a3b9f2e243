"""What the prefix indexes cost, and what they find on real traces."""

__all__: list[str] = []
