"""Measurements of plans and of the order of those that wait."""
