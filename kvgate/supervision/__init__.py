"""Child processes: starting, watching and stopping them."""
