"""The HTTP front of kvgate: an OpenAI-compatible gateway that knows which engine instance holds which prefix."""
