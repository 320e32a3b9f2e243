"""Benchmarks that drive a running gateway from the outside, as a client would."""

__all__: list[str] = []
