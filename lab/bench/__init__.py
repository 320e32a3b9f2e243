"""Benchmarks: what kvgate's numbers claim, measured on this machine."""
