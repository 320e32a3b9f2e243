"""The order of waiting requests, the pace of prompts beside answers, and the timeline of an engine's steps."""

__all__: list[str] = []
