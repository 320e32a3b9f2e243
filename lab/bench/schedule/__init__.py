"""What plans and queue orders cost, and what queue orders do to requests."""
