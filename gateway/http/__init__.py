"""HTTP transport: connections, exchanges, body decoding and limits, deadlines and shutdown; it knows no routing."""
