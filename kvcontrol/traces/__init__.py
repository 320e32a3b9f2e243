"""Public traces of real LLM serving, read as requests for blocks."""

from kvcontrol.traces.reader import AGENTIC, MOONCAKE, TraceError, read_by_time, read_trace
from kvcontrol.traces.request import Request

__all__ = ["AGENTIC", "MOONCAKE", "Request", "TraceError", "read_by_time", "read_trace"]
