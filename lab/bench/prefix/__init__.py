"""What the prefix indexes cost, and what they find on real traces."""
