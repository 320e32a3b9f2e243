"""Public traces of real LLM serving, read as requests for blocks."""

from lab.traces.arrivals import read_requests
from lab.traces.reader import AGENTIC, MOONCAKE, TraceError, read_by_time, read_trace
from lab.traces.request import Request

__all__ = ["AGENTIC", "MOONCAKE", "Request", "TraceError", "read_by_time", "read_requests", "read_trace"]
