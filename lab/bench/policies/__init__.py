"""What eviction policies are worth on traces, and what their decisions cost."""
