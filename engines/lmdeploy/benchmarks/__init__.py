"""Measurements of a running instance."""

__all__: list[str] = []
