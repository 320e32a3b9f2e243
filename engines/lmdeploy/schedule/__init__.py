"""The order of waiting requests, the pace of prompts and answers, and the timeline of an engine's steps."""

__all__: list[str] = []
