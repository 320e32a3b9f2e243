"""What makes a graph better without changing what it means: one pass a file."""
