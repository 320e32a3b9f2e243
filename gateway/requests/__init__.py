"""From the bytes of a request to a call: formats of the APIs, bounds on bodies, size estimates, local tokenization."""
