"""What every engine's server reads from a request, and what it refuses."""

__all__: list[str] = []
