"""The field ``stop`` of a body."""

Stop = str | list[str] | None


def stop_words(stop: Stop) -> tuple[str, ...]:
    """Return the words that end an answer."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
