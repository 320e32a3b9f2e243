"""Chooses instances for a request: candidates, cached prefixes, routing, separation of prefill and decode."""
