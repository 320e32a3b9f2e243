"""Traces replayed: through eviction policies, or over HTTP through a running gateway."""
