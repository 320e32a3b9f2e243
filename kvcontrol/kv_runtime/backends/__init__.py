"""The memory that tiers are made of."""
