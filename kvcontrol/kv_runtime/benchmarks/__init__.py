"""What the runtime's memory can do on this machine."""

__all__: list[str] = []
