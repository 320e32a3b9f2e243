"""Talking to engine instances: requests, their answers, and the KV events that they publish."""

from gateway.upstream.client import UpstreamClient
from gateway.upstream.event_feed import EventFeed
from gateway.upstream.failure import FailureKind, UpstreamFailureError
from gateway.upstream.opening import Opening
from gateway.upstream.relay import Relayed, relay
from gateway.upstream.retry import Attempts, RetryBudget
from gateway.upstream.sliced_work import SlicedWork
from gateway.upstream.timeouts import Timeouts

__all__ = [
    "Attempts",
    "EventFeed",
    "FailureKind",
    "Opening",
    "Relayed",
    "RetryBudget",
    "SlicedWork",
    "Timeouts",
    "UpstreamClient",
    "UpstreamFailureError",
    "relay",
]
