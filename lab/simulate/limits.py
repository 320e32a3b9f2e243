"""What simulations may be told at most: more is a slip, and would take time or memory until the machine has none."""

from typing import Final

MOST_INSTANCES: Final = 10_000
MOST_COPIES: Final = 10_000
MOST_REQUESTS: Final = 5_000_000
MOST_FLEET_BLOCKS: Final = 200_000_000
"""Of all instances, all tiers together."""
LEAST_SPEED: Final = 1e-3
MOST_SPEED: Final = 1e6
MOST_TIMES_HBM: Final = 10_000.0
MOST_USERS: Final = 100_000
MOST_SEEDS: Final = 100
MOST_USD: Final = 1e6
"""An hour, of an instance or of a GiB."""
MOST_CHECK_S: Final = 86_400.0
