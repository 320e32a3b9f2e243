"""What parts of the gateway cost."""

__all__: list[str] = []
