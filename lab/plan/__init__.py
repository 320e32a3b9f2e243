"""Capacity planning: the smallest simulated fleet that serves a trace as well as was asked for, and what it costs."""
