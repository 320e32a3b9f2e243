"""``kvgate engine``: one instance, its options, its limits and its tiers."""
