"""Simulated fleets: what simulating them costs, and how close a live run comes to its simulation."""
