"""Tools beside the product: benchmarks, replays, simulated fleets, capacity plans, conformance cases, research."""
