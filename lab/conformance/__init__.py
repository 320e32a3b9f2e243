"""Black-box cases for any OpenAI-compatible gateway: what breaks in gateways, and whether it does in this one."""
