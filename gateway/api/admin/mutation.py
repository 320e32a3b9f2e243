"""The headers of a request that changes something: which version is meant, and whether it was sent before."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request
from pydantic import BaseModel

from gateway.errors import ApiError, ConflictApiError, InvalidRequestError, PreconditionError
from gateway.state import ABSENT, Action, ConflictError, Document, Kind
from gateway.state.stored import newer

_ETAG: Final = re.compile(r'"(\d{1,18})"')
_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")


class OvertakenError(ConflictApiError):
    """Another change came between reading and writing a document, and no precondition names its version."""


class Mutation:
    """The headers of a request that changes something; a FastAPI dependency."""

    def __init__(
        self,
        request: Request,
        if_match: Annotated[
            str | None,
            Header(
                pattern=r'^("\d{1,18}"|\*)$', description='The ETag that the document must have, like "3"; * is any.'
            ),
        ] = None,
        if_none_match: Annotated[
            str | None, Header(pattern=r"^\*$", description="* creates only if it does not exist.")
        ] = None,
        idempotency_key: Annotated[
            str | None,
            Header(
                pattern=r"^[\x21-\x7e]{1,128}$",
                description="Up to 128 visible ASCII characters; the same request is carried out once a day.",
            ),
        ] = None,
    ) -> None:
        self._request = request
        self._if_match = if_match
        self._create_only = if_none_match is not None
        if if_match is not None and if_none_match is not None:
            raise InvalidRequestError("give If-Match or If-None-Match, not both", param="If-Match")
        self.idempotency_key = idempotency_key

    @property
    def conditional(self) -> bool:
        return self._create_only or self._if_match is not None

    @property
    def server(self) -> tuple[str, int | None] | None:
        """Return the gateway's address that the request used."""
        found: tuple[str, int | None] | None = self._request.scope.get("server")
        return found

    @property
    def request_id(self) -> str:
        given = self._request.headers.get("x-request-id", "")
        return given if _KEY.fullmatch(given) else ""

    def expected(self, present: Document | None) -> int | None:
        """Return the version that the change is meant for; None is any. Raises ``PreconditionError``."""
        if self._create_only:
            return ABSENT
        if self._if_match is None:
            return None
        if present is None:
            raise PreconditionError("If-Match: the document does not exist")
        match = _ETAG.fullmatch(self._if_match)
        return int(match.group(1)) if match else present.version

    def expected_as_read(self, present: Document | None) -> int:
        """Return the version that the change is meant for, which must be ``present``'s where no header names one.
        Raises ``PreconditionError``.
        """
        wanted = self.expected(present)
        return (ABSENT if present is None else present.version) if wanted is None else wanted

    def stale(self, kind: Kind, name: str, found: int) -> ApiError:
        """Return the refusal of a change that is meant for another version than the one there is."""
        return refusal(ConflictError(kind, name, expected=None, found=found), conditional=self.conditional)

    def action(
        self, action: str, target: str, detail: Mapping[str, Any] | None = None, *, outcome: str = "done"
    ) -> Action:
        """Return the audit entry of this request."""
        return Action(
            actor=_actor(self._request),
            action=action,
            target=target,
            outcome=outcome,
            detail=json.dumps(detail or {}),
            request_id=self.request_id,
        )

    async def digest(self) -> str:
        """Return a digest that distinguishes requests with the same idempotency key."""
        head = f"{self._request.method} {self._request.url.path}?{self._request.url.query}\n{self._if_match}\n"
        return hashlib.sha256(head.encode() + await self._request.body()).hexdigest()


def expected_of(mutation: Mutation, model: type[BaseModel], present: Document | None) -> int | None:
    """Return the version that a document must have to be replaced. One with fields of a newer version must still be
    the document whose fields are kept.
    """
    wanted = mutation.expected(present)
    return present.version if wanted is None and present is not None and newer(model, present) else wanted


MutationOf = Annotated[Mutation, Depends()]


def must(document: Document | None) -> Document:
    """Return a document that was just written."""
    if document is None:
        raise RuntimeError("a document that was just written is not there")
    return document


def etag(document: Document) -> str:
    """Return a document's ETag."""
    return f'"{document.version}"'


def _actor(request: Request) -> str:
    return f"admin@{request.client.host}" if request.client else "admin"


def refusal(conflict: ConflictError, *, conditional: bool) -> ApiError:
    """Return the 412 or 409 for a change that is meant for another version than the one there is."""
    if conditional:
        return PreconditionError(
            f'{conflict.kind} {conflict.name!r} has the ETag "{conflict.found}" now'
            if conflict.found
            else f"there is no {conflict.kind} {conflict.name!r}"
        )
    return OvertakenError(f"{conflict.kind} {conflict.name!r} was changed by another request; read it and try again")
