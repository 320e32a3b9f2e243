"""How good predictions of block lifetimes and prefetches are on traces."""
