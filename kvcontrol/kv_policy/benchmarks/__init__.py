"""What policies are worth on traces, and what their decisions cost."""
