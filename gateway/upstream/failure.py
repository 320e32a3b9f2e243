"""Kinds of upstream failures, without addresses: clients and reports of the fleet contain them."""

from enum import StrEnum


class FailureKind(StrEnum):
    """How an instance failed a request."""

    CONNECT = "connect"  # refused or unreachable
    CONNECT_TIMEOUT = "connect_timeout"
    NO_FILES = "no_files"  # this process has no file descriptor left for a connection
    NO_ANSWER = "no_answer"  # the connection ended before any byte of the answer
    NO_HTTP = "no_http"  # what came is no answer that could be passed on
    EMPTY = "empty"  # a success without a body
    REDIRECTED = "redirected"  # it sends whoever asks to another address
    HUNG = "hung"  # it failed its health checks while the request waited for its first byte
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    CUT = "cut"  # the connection ended within the answer
    IDLE_TIMEOUT = "idle_timeout"
    BAD_ENCODING = "bad_encoding"  # the answer's content-encoding doesn't fit its bytes


class UpstreamFailureError(Exception):
    """An instance failed a request; the message is fit for the client."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
