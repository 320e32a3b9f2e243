"""Baselines, oracles and reference interpreters: what the product is compared with, and what nothing of it uses."""
