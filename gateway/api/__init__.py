"""Routes that clients and operators call; they stand on the pipeline."""

__all__: list[str] = []
