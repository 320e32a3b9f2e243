"""Drives a gateway with the requests of a trace, and says how it did."""
