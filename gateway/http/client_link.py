"""A client's connection as an exchange uses it, and signs that find out whether a silent client is still there."""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.http.transport import ClientTransport

_PROBES_S: Final = (0.1, 0.4, 1.5)
_LATER_PROBES_S: Final = 5.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"
_EVENT_ENDS: Final = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class ClientLink:
    """``active`` is the request that is answered now, ``event_stream`` says that its answer is a stream of events."""

    __slots__ = ("_flow", "_gone", "_writer", "active", "event_stream")

    def __init__(self, writer: ClientTransport, flow: FlowControl) -> None:
        self._writer = writer
        self._flow = flow
        self._gone: Callable[[], object] | None = None
        self.active: RequestResponseCycle | None = None
        self.event_stream = False

    @property
    def full(self) -> bool:
        """Whether a write would now have to wait for the client."""
        return bool(self._flow.write_paused)

    def watch(self, gone: Callable[[], object]) -> None:
        """Call ``gone`` when the client disconnects, at once if it has; one callback at a time, until ``unwatch``."""
        self._gone = gone
        if self._writer.is_closing():
            gone()
        else:
            self._flow.resume_reading()  # a long body may have left it paused, and who doesn't read sees no end

    def unwatch(self) -> None:
        self._gone = None

    def lost(self) -> None:
        """Call ``gone``: the connection has ended."""
        if self._gone is not None:
            self._gone()

    def hold(self) -> None:
        """Hold writes until ``release``."""
        self._writer.hold()

    def release(self) -> None:
        """Write the held bytes at once: head and body of an answer are one system call and one packet."""
        self._writer.release()

    def abort(self) -> None:
        """Disconnect a client that does not read its answer; unread bytes are lost."""
        if self.active is not None:
            self.active.disconnected = True
        self._writer.abort()


class ClientProbe:
    """Sends something that means nothing to a client that has sent all that it will, or has gone: both look alike. A
    client that has gone answers it with a reset. HTTP/1.0 has nothing that means nothing.
    """

    __slots__ = ("_link", "_loop", "_sent", "_timer", "_writer")

    def __init__(self, loop: AbstractEventLoop, writer: ClientTransport, link: ClientLink) -> None:
        self._loop = loop
        self._writer = writer
        self._link = link
        self._sent = 0
        self._timer: TimerHandle | None = None

    def possible(self, active: RequestResponseCycle) -> bool:
        """Whether a probe could be sent within this answer."""
        if active.response_complete or active.scope["http_version"] == "1.0":
            return False
        return not active.response_started or self._writer.holds or self._link.event_stream

    def send(self) -> None:
        """Send a probe, and further ones until the answer has ended."""
        active = self._link.active
        if active is None or active.response_complete or self._writer.is_closing():
            return
        if not active.response_started:
            self._writer.write(_CONTINUE)
        elif self._link.event_stream and not self._writer.holds and self._between_events:
            self._writer.write(_COMMENT)
        later_s = _PROBES_S[self._sent] if self._sent < len(_PROBES_S) else _LATER_PROBES_S
        self._sent += 1
        self._timer = self._loop.call_later(later_s, self.send)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _between_events(self) -> bool:
        """Whether the last write was a head or the end of an event."""
        last = self._writer.last
        return last.endswith(_EVENT_ENDS) or last.startswith(b"HTTP/1.1 ")
