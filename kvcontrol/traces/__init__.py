"""Public traces of real LLM serving, read as requests for blocks, and text that stands for their blocks."""

from kvcontrol.traces.arrivals import read_requests
from kvcontrol.traces.reader import AGENTIC, MOONCAKE, TraceError, read_by_time, read_trace
from kvcontrol.traces.request import Request
from kvcontrol.traces.synthesis import OPENER, Ask, BlockTexts, SynthesisError, TextMaker, Told, Words, learn_words
from kvcontrol.traces.usage import UsageError, Used, header_tokens, used

__all__ = [
    "AGENTIC",
    "MOONCAKE",
    "OPENER",
    "Ask",
    "BlockTexts",
    "Request",
    "SynthesisError",
    "TextMaker",
    "Told",
    "TraceError",
    "UsageError",
    "Used",
    "Words",
    "header_tokens",
    "learn_words",
    "read_by_time",
    "read_requests",
    "read_trace",
    "used",
]
