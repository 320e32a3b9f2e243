"""What clients and operators call. ``exchange`` and ``schemas`` lie below the pipeline, ``openai`` and ``ops`` above
it.
"""

__all__: list[str] = []
