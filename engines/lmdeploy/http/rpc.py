"""The socket by which an engine process answers its api_server loses nothing.

A ZMQ ROUTER drops what its peer's queue has no room for, without a word, and the queue is 1,000 messages long unless
somebody says otherwise: with more requests than that in an engine, answers got lost and their requests waited for ever.
What is in the queue is bounded all the same: a call has one answer, and ``concurrency_limit.py`` bounds the requests.
"""

from collections.abc import Callable
from typing import Any, Final

_ADDRESS: Final = "tcp://localhost"
_UNBOUNDED: Final = 0


def rpc_server_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``AsyncRPCServer.__init__``, in the engine process: it listens anew, as a bound holds from then on."""

    def __init__(self: Any) -> None:  # noqa: N807  # it is called by this name
        original(self)
        self.socket.unbind(self.socket.last_endpoint)
        self.socket.set_hwm(_UNBOUNDED)
        self.port = self.socket.bind_to_random_port(_ADDRESS)

    return __init__
