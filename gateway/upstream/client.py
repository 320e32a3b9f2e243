"""One request to one instance, over a pooled connection, with a bound on every wait."""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import inf
from time import monotonic

from gateway.http.connect_failure import connect_failure_reason, is_own_fault
from gateway.http.connection import Connection, ConnectionLostError, NoAnswerError
from gateway.http.connection_pool import ConnectionPool, Origin
from gateway.http.headers import Header, request_head
from gateway.http.inflate import DamagedError, Inflate
from gateway.http.interrupt import Interrupt, InterruptError
from gateway.upstream.failure import FailureKind, UpstreamFailureError
from gateway.upstream.silence import Silence
from gateway.upstream.timeouts import Timeouts

Hung = Callable[[], asyncio.Future[None]]
"""Gives what is done while the instance is out because of its failed health checks, and pending otherwise."""


class UpstreamResponse:
    """An answer whose first bytes have arrived. Close it in any case; closing early drops the connection, which makes
    the engine stop working on it.
    """

    def __init__(
        self,
        connection: Connection,
        watch: "_Watch",
        give_back: Callable[[Connection], None],
        silence: Silence | None = None,
    ) -> None:
        self._connection = connection
        self._silence = silence
        self._watch = watch
        self._give_back: Callable[[Connection], None] | None = give_back
        self._all_read = False
        self.status = connection.status
        headers = connection.headers
        self.is_event_stream = False
        codings: list[bytes] = []
        for name, value in headers:
            if name == b"content-type":
                self.is_event_stream = value.partition(b";")[0].strip().lower() == b"text/event-stream"
            elif name == b"content-encoding":
                codings.append(value.strip().lower())
        coding = b", ".join(codings)
        self._decoder: Inflate | None = None
        if coding in _INFLATED:
            self._decoder = Inflate()
            headers = [(name, value) for name, value in headers if name != b"content-encoding"]
        self.readable = self._decoder is not None or coding in _PLAIN
        self.headers: Sequence[Header] = headers

    async def read(self) -> bytes:
        """Return the next bytes of the body, decoded, as soon as there are any; empty at its end.

        Raises ``UpstreamFailureError`` when it ends too early, or is silent for too long.
        """
        connection, decoder = self._connection, self._decoder
        while True:
            if decoder is not None and decoder.more:
                if decoded := _decoded(decoder):
                    return decoded
                continue
            data = connection.take()
            if not data:
                if connection.ended:
                    _check_whole(decoder)
                    return b""
                try:
                    came = await connection.arrival()
                except ConnectionLostError:
                    raise UpstreamFailureError(
                        FailureKind.CUT, "the engine's connection ended within its answer"
                    ) from None
                if not came and self._silence is not None:
                    await self._silence.silent()
                continue
            if decoder is None:
                return data
            if decoded := _decoded(decoder, data):
                return decoded

    def hush(self) -> None:
        """Tell nobody of its silence any more: it is no stream."""
        self._silence = None

    @property
    def exhausted(self) -> bool:
        """Whether all of it has been read: then ``read`` returns nothing, at once."""
        connection = self._connection
        return connection.ended and not connection.held_bytes and (self._decoder is None or self._decoder.whole)

    def expect_end(self) -> None:
        """Note that all has been read that will be: its connection need not be closed for what is left of it."""
        self._all_read = True

    def close(self) -> None:
        """Idempotent. A fully read answer gives its connection back, as does one whose end is expected when it comes
        soon; any other one closes it.
        """
        give_back, self._give_back = self._give_back, None
        if give_back is None:
            return
        self._watch.stop()
        if self._all_read and not self._connection.ended:
            self._connection.linger(_LINGER_S, give_back)
        else:
            give_back(self._connection)


def _check_whole(decoder: Inflate | None) -> None:
    if decoder is not None and not decoder.whole:
        raise UpstreamFailureError(FailureKind.BAD_ENCODING, "the engine's compressed answer is cut off")


def _decoded(decoder: Inflate, data: bytes = b"") -> bytes:
    try:
        return decoder.decode(data)
    except DamagedError as error:
        raise UpstreamFailureError(
            FailureKind.BAD_ENCODING, f"the engine's compressed answer is damaged: {error}"
        ) from error


class _Watch:
    """Ends an answer that is late or silent, and nudges whoever waits for it after each ``quiet_s`` of silence: one
    timer for all of it, which looks when it may be time.
    """

    __slots__ = (
        "_begins_until_s",
        "_connection",
        "_head_timer",
        "_hung",
        "_loop",
        "_nudged_s",
        "_quiet_s",
        "_stuck",
        "_timeouts",
        "_timer",
    )

    def __init__(
        self, connection: Connection, timeouts: Timeouts, hung: Hung, *, left_s: float, quiet_s: float = inf
    ) -> None:
        self._connection = connection
        self._timeouts = timeouts
        self._hung = hung
        self._quiet_s = quiet_s
        self._loop = connection.loop
        self._nudged_s = self._loop.time()
        self._begins_until_s: float | None = self._nudged_s + left_s
        self._timer = self._loop.call_later(min(left_s, quiet_s), self._look)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.Future[None] | None = hung()
        self._stuck.add_done_callback(self._hangs)

    def begun(self) -> None:
        """The first byte is there: from now on silence is what is watched."""
        self._begins_until_s = None
        self._forget_stuck()
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._connection.ended:
            self._timer.cancel()
        elif self._timeouts.hung_s < self._timeouts.first_byte_s:
            self._timer.cancel()
            self._timer = self._loop.call_later(min(self._timeouts.hung_s, self._quiet_s), self._look)

    def headed(self) -> None:
        """The head is there alone: nudge if that stays so for a moment."""
        self._head_timer = self._loop.call_later(_HEAD_ALONE_S, self._connection.nudge)

    def stop(self) -> None:
        """Idempotent."""
        self._timer.cancel()
        if self._stuck is not None:
            self._forget_stuck()
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _forget_stuck(self) -> None:
        stuck, self._stuck = self._stuck, None
        if stuck is not None:
            stuck.remove_done_callback(self._hangs)

    def _hangs(self, _: object) -> None:
        self._fail(FailureKind.HUNG, "the engine stopped answering")

    def _look(self) -> None:
        now_s = self._loop.time()
        times = self._timeouts
        if self._begins_until_s is not None:
            if now_s < self._begins_until_s:
                self._again(min(self._begins_until_s - now_s, self._quiet_for(now_s, self._nudged_s)))
            else:
                self._fail(FailureKind.FIRST_BYTE_TIMEOUT, f"the engine sent nothing for {times.first_byte_s:g} s")
            return
        if not self._connection.waiting:
            self._again(min(times.hung_s, self._quiet_s))
            return
        since_s = self._connection.waiting_since_s
        silent_s = now_s - since_s
        quiet_s = self._quiet_for(now_s, max(since_s, self._nudged_s))
        if silent_s >= times.idle_s:
            self._fail(FailureKind.IDLE_TIMEOUT, f"the engine was silent for {times.idle_s:g} s within its answer")
        elif silent_s < times.hung_s:
            self._again(min(times.hung_s - silent_s, quiet_s))
        elif self._hung().done():
            self._fail(FailureKind.IDLE_TIMEOUT, "the engine stopped answering within its answer")
        else:
            self._again(min(times.hung_s, times.idle_s - silent_s, quiet_s))

    def _quiet_for(self, now_s: float, since_s: float) -> float:
        """Nudge where it has been silent for long enough; return in how many seconds that may be again."""
        left_s = since_s + self._quiet_s - now_s
        if left_s > 0:
            return left_s
        self._nudged_s = now_s
        self._connection.nudge()
        return self._quiet_s

    def _again(self, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._look)

    def _fail(self, kind: FailureKind, message: str) -> None:
        self._connection.fail(UpstreamFailureError(kind, message))


class UpstreamClient:
    """Sends requests over pooled connections, with a bound on every wait and none on the length of an answer."""

    def __init__(self, pool: ConnectionPool, timeouts: Timeouts) -> None:
        self._pool = pool
        self._timeouts = timeouts
        self._origins = lru_cache(maxsize=4096)(Origin.of)

    async def open(  # noqa: PLR0913 - a request, and who watches over it
        self,
        url: str,
        path: bytes,
        *,
        headers: Sequence[Header],
        body: bytes,
        hung: Hung,
        silence: Silence | None = None,
    ) -> UpstreamResponse:
        """POST a body to ``path`` below an instance's URL, and return once the first byte of the answer's body is there
        (or its empty end). A redirection is a failure: where it leads is the private network's affair, and nobody named
        what is there as an instance.

        ``hung`` ends the wait as soon as it is done, and a later silence soon; ``silence`` is told of it, now and while
        the answer is read. A kept connection that turns out to be closed, with nothing having come or with a 408, is
        replaced by a new one, once. Raises ``UpstreamFailureError``.
        Cancelling it closes the connection.
        """
        origin = self._origins(url)
        until_s = monotonic() + self._timeouts.first_byte_s
        connection = self._pool.idle(origin)
        used_before = connection is not None
        while True:
            if connection is None:
                connection = await self._connect(origin, hung)
            quiet_s = inf if silence is None else silence.after_s
            watch = _Watch(connection, self._timeouts, hung, left_s=until_s - monotonic(), quiet_s=quiet_s)
            try:
                connection.send(_head(origin, path, headers, body), body, None if silence is None else watch.headed)
                await _arrived(connection, silence)
                watch.begun()
            except NoAnswerError as error:
                watch.stop()
                raise UpstreamFailureError(FailureKind.NO_HTTP, f"the engine's answer can't be read: {error}") from None
            except ConnectionLostError:
                watch.stop()
                if (
                    used_before and not connection.arrived_bytes
                ):  # it was closed for being idle, as the request went out
                    used_before, connection = False, None
                    continue
                raise UpstreamFailureError(
                    FailureKind.NO_ANSWER, "the engine closed the connection before it answered"
                ) from None
            except BaseException:
                watch.stop()
                connection.abort()
                raise
            if connection.status == _TOO_SLOW and used_before:  # it was meant for a connection that is idle
                watch.stop()
                connection.abort()
                used_before, connection = False, None
                continue
            if connection.status in _REDIRECTIONS:
                watch.stop()
                connection.abort()
                raise _redirected(connection.status)
            return UpstreamResponse(connection, watch, partial(self._pool.give_back, origin), silence)

    async def _connect(self, origin: Origin, hung: Hung) -> Connection:
        interrupt = Interrupt()
        stuck = hung()
        stuck.add_done_callback(interrupt.fire)
        try:
            with interrupt:
                async with asyncio.timeout(min(self._timeouts.connect_s, self._timeouts.first_byte_s)):
                    return await self._pool.connect(origin)
        except InterruptError:
            raise UpstreamFailureError(FailureKind.HUNG, "the engine stopped answering") from None
        except TimeoutError as error:
            raise UpstreamFailureError(FailureKind.CONNECT_TIMEOUT, "connecting to the engine took too long") from error
        except OSError as error:
            if is_own_fault(error):
                raise UpstreamFailureError(
                    FailureKind.NO_FILES, "this gateway has no file descriptor left for a connection to an engine"
                ) from error
            raise UpstreamFailureError(
                FailureKind.CONNECT, f"the engine could not be reached: {connect_failure_reason(error)}"
            ) from error
        finally:
            stuck.remove_done_callback(interrupt.fire)


def _redirected(status: int) -> UpstreamFailureError:
    return UpstreamFailureError(
        FailureKind.REDIRECTED,
        f"the engine answered {status}: redirections are neither followed nor passed on; name the instance by the "
        "address at which it answers",
    )


async def _arrived(connection: Connection, silence: Silence | None) -> None:
    """Return when the first data is there; each nudge until then is told of, the first one behind a head as that."""
    while not await connection.arrival():
        if silence is None:
            continue
        if connection.status and not connection.head_reported:
            connection.head_reported = True
            await silence.headed(connection.status, connection.headers)
        else:
            await silence.silent()


def _head(origin: Origin, path: bytes, headers: Sequence[Header], body: bytes) -> bytes:
    end = b"content-length: %d\r\n\r\n" % len(body)
    return request_head((origin.head, path, origin.host), headers, end, lines=origin.host.count(b"\n") + _END_LINES)


_END_LINES = 2  # content-length, and the empty one
_REDIRECTIONS = range(300, 400)
_TOO_SLOW = 408
_LINGER_S = 1.0
_HEAD_ALONE_S = 0.05
"""So long is waited for data behind a head, before it is passed on alone: engines write one after the other."""
_INFLATED = frozenset({b"gzip", b"x-gzip", b"deflate"})
_PLAIN = frozenset({b"identity", b""})
