"""What a pool of KV blocks costs, and how much of its memory it loses."""
