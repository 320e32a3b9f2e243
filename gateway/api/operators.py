"""Access to operators' data: tenants, their traffic and the engines' addresses."""

from collections.abc import Sequence

from fastapi import Request

from gateway.api.admin import AdminAccess
from gateway.api.browsers import Hosts, unknown_host
from gateway.errors import ApiError, AuthenticationError


class OperatorAccess:
    """Open to local callers without ``keys``, otherwise to callers with one of them.

    The name is checked because a page whose own name is bound to 127.0.0.1 could read the data.
    """

    def __init__(self, keys: Sequence[str], *, hosts: Hosts) -> None:
        self._keys = tuple(AdminAccess(each) for each in keys)
        self._hosts = hosts

    def check(self, request: Request) -> None:
        """Raise ``AuthenticationError`` or ``PermissionDeniedError`` for callers without access to the data."""
        if (refusal := self._refusal(request)) is not None:
            raise refusal

    def allows(self, request: Request) -> bool:
        """Whether a request may see the data."""
        return self._refusal(request) is None

    def _refusal(self, request: Request) -> ApiError | None:
        if not self._keys:
            host = request.headers.get("host", "").encode("latin-1")
            return None if self._hosts.knows(host) else unknown_host(host)
        given = request.headers.get("authorization")
        if any(_holds(key, given) for key in self._keys):
            return None
        return AuthenticationError(
            "this is for operators: send the header Authorization: Bearer <metrics_key or admin_key>",
            code="operator_key_required",
        )


def _holds(key: AdminAccess, authorization: str | None) -> bool:
    try:
        key.check(authorization)
    except AuthenticationError:
        return False
    return True
