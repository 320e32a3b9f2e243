"""The HTTP front: an OpenAI-compatible gateway that knows which instance holds which prefix."""

__all__: list[str] = []
