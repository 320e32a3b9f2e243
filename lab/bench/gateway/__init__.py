"""What the gateway costs: processor time for each request and each streamed piece, and the latency that it adds."""
