"""How every change of the admin API is made: once, on the version that was meant, audited, and in force at its answer.

- *Optimistic concurrency.* Every document has an ``ETag``. ``If-Match`` with it makes a change only if no other change
  came in between (412), ``If-None-Match: *`` only if there is no document yet. Without either the last change wins: a
  change that keeps a part of the document is repeated where another change was first.
- *Idempotency.* A request with an ``Idempotency-Key`` is carried out once within a day. Sent again it gets the
  same answer (with ``idempotency-replayed: true``) but for what is shown once; another request with that key is a 422.
- *Audit.* A change and its entry in the log are one transaction. Refused changes are not in it, failed ones are.
- *Operations.* A change outside of the store (a cancelled plan, a policy on instances) is written as ``begun`` before
  it is made, so it is not made while the store can't be written; its outcome replaces the entry. If the store becomes
  unavailable in between, an operation with nothing to store is answered as done and its outcome is written later
  (``operations.py``); one with something to store is rolled back. If its gateway dies, another gateway undoes it.
"""

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, Protocol

from fastapi import Request, Response
from pydantic import BaseModel

from gateway.api.admin.mutation import Mutation, OvertakenError, etag, expected_of, must, refusal
from gateway.api.admin.operations import Operation, Operations
from gateway.errors import (
    ApiError,
    IdempotencyError,
    NoInstanceError,
)
from gateway.state import (
    Action,
    Change,
    ConflictError,
    Delete,
    Document,
    Kind,
    OperationLostError,
    OutcomeUnknownError,
    Put,
    Remembered,
    RepeatedKeyError,
    Store,
    StoreUnavailableError,
)
from gateway.state.stored import written

_ETAG: Final = re.compile(r'"(\d{1,18})"')
_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")
_RETRY_AFTER_S: Final = 2
_BEGUN: Final = "begun"
_MOST_ATTEMPTS: Final = 20
_OF_THE_STATE: Final = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED})
"""Refusals for what there is, or isn't."""

_log = logging.getLogger(__name__)


class Author(Protocol):
    """Who makes a change, as the audit log names it: a request's sender, or a rule."""

    def action(
        self, action: str, target: str, detail: Mapping[str, Any] | None = None, *, outcome: str = "done"
    ) -> Action:
        """Return the audit entry of a change."""


Shown = Callable[[Sequence[Document | None]], Mapping[str, Any] | None]
"""Makes an answer's body of the documents after the change; None is an empty one."""


class Changes:
    """Applies changes to the store; ``refresh`` makes them count in this process."""

    def __init__(self, store: Store, refresh: Callable[[], Awaitable[None]], *, lease_s: float) -> None:
        self._store = store
        self._refresh = refresh
        self.operations = Operations(store, lease_s=lease_s)

    @property
    def store(self) -> Store:
        return self._store

    async def refresh(self) -> None:
        await self._refresh()

    async def carried_out(self, attempt: Callable[[], Awaitable[Response]]) -> Response:
        """Return the answer of ``attempt``, which reads documents and changes them. Repeat it where another change came
        in between, 20 times at most; then raise ``OvertakenError``.
        """
        for _ in range(_MOST_ATTEMPTS - 1):
            try:
                return await attempt()
            except OvertakenError as error:
                _log.info("a change is made again: %s", error)
        return await attempt()

    async def replayed(self, mutation: Mutation) -> Response | None:
        """Return the answer to an earlier copy of this request, if there is one; raises ``IdempotencyError``."""
        if mutation.idempotency_key is None:
            return None
        before = self.operations.remembered(mutation.idempotency_key)
        before = before or await self._store.remembered(mutation.idempotency_key)
        if before is None:
            return None
        if before.request != await mutation.digest():
            raise IdempotencyError("this Idempotency-Key was used for another request within the last day")
        headers = {"idempotency-replayed": "true"} | ({"etag": before.etag} if before.etag else {})
        return _response(before.status, before.body, headers)

    async def replayed_after(self, refusal: ApiError, request: Request) -> Response | None:
        """Return what was answered to a request that is refused for what it has done itself: it came twice at once, and
        the other one was first.
        """
        key = request.headers.get("idempotency-key")
        if key is None or refusal.status not in _OF_THE_STATE:
            return None
        try:
            return await self.replayed(Mutation(request, if_match=request.headers.get("if-match"), idempotency_key=key))
        except StoreUnavailableError as error:
            _log.warning("whether a refused request was carried out before can't be looked up: %s", error)
            return None

    @asynccontextmanager
    async def operation(
        self,
        author: Author,
        verb: str,
        target: str,
        detail: Mapping[str, Any] | None = None,
        *,
        undone: str = "failed",
    ) -> AsyncIterator[Operation]:
        """Let the block make a change outside of the store, which ``apply`` with the operation ends; ``undone`` is the
        outcome if the block raises. Raises ``StoreUnavailableError``, ``OperationBusyError`` before the block runs.
        """
        operation = await self.operations.begin(author.action(verb, target, detail, outcome=_BEGUN))
        try:
            yield operation
        except BaseException as error:
            if not operation.ended:
                cut = not isinstance(error, Exception)  # in the middle of the change
                operation.unfinished = operation.unfinished or (operation.noted and cut)
                action = author.action(verb, target, detail, outcome=undone)
                if isinstance(error, ApiError):
                    await self.end(operation, action)
                else:
                    self.operations.keep(operation, action)
            raise

    async def end(self, operation: Operation, action: Action) -> None:
        """Write the outcome of an operation that stores nothing and is not answered as done."""
        try:
            await self.operations.close(operation.number, action, unfinished=operation.unfinished)
        except StoreUnavailableError as error:
            _log_later(action, error)
            self.operations.keep(operation, action)
            return
        except OperationLostError as error:
            _log.warning(
                "the result of %s %s was not written to the audit log: %s", action.action, action.target, error
            )
        self.operations.over(operation)

    async def apply(  # noqa: PLR0913 - each call names them
        self,
        changes: Sequence[Change],
        *,
        mutation: Mutation,
        action: Action,
        status: int,
        shown: Shown,
        secret: Mapping[str, Any] | None = None,
        operation: Operation | None = None,
    ) -> Response:
        """Make the changes and answer with ``shown``; ``secret`` is added to this answer and to no replayed one.

        The first document's version is the ``ETag``. With an ``operation`` the action is its end. Raises ``ApiError``,
        ``OperationLostError``, and ``StoreUnavailableError`` unless an operation without changes has been done.
        """
        if operation is None and (replayed := await self.replayed(mutation)) is not None:
            return replayed
        digest = await mutation.digest()

        def remember(documents: Sequence[Document | None]) -> Remembered:
            body = shown(documents)
            return Remembered(
                key=mutation.idempotency_key or "",
                request=digest,
                status=status,
                body="" if body is None else json.dumps(body),
                etag=_etag(documents),
            )

        try:
            documents = await self._store.apply(
                changes,
                action=action,
                remember=None if mutation.idempotency_key is None else remember,
                completes=None if operation is None else operation.number,
            )
        except RepeatedKeyError:  # the same request came twice at once, and the other one was first
            if operation is not None:
                await self.end(operation, action)
            if (replayed := await self.replayed(mutation)) is not None:
                return replayed
            raise
        except ConflictError as conflict:
            meant = (conflict.kind, conflict.name) == (changes[0].kind, changes[0].name)
            raise refusal(conflict, conditional=meant and mutation.conditional) from None
        except StoreUnavailableError as error:
            if operation is None or changes:
                raise
            _log_later(action, error)
            documents = []
            self.operations.keep(operation, action, remember(documents) if mutation.idempotency_key else None)
        if operation is not None and not operation.ended:
            self.operations.over(operation)
        done = remember(documents)
        headers = {"x-kvgate-in-force": "later"} if changes and not await self._in_force() else {}
        headers |= {"etag": done.etag} if done.etag else {}
        body = done.body if secret is None else json.dumps({**json.loads(done.body), **secret})
        return _response(status, body, headers)

    async def _in_force(self) -> bool:
        """Apply the stored change in this process; if the store is unavailable, its loops apply it later."""
        try:
            await self._refresh()
        except StoreUnavailableError as error:
            _log.warning("a change was stored and counts here when the store can be read again: %s", error)
            return False
        return True

    async def put(  # noqa: PLR0913 - each call names them
        self,
        kind: Kind,
        name: str,
        body: BaseModel,
        *,
        mutation: Mutation,
        target: str,
        view: Callable[[Document], BaseModel],
    ) -> Response:
        """Make one document or replace it, and answer with its ``view``. Raises ``ApiError``."""

        async def attempt() -> Response:
            if (replayed := await self.replayed(mutation)) is not None:
                return replayed
            present = await self._store.document(kind, name)
            expected = expected_of(mutation, type(body), present)
            return await self.apply(
                [Put(kind=kind, name=name, body=written(body, present), expected=expected)],
                mutation=mutation,
                action=mutation.action("put", target, body.model_dump(mode="json")),
                status=200,
                shown=lambda documents: view(must(documents[0])).model_dump(mode="json"),
            )

        return await self.carried_out(attempt)

    async def delete(
        self, kind: Kind, name: str, *, mutation: Mutation, target: str, missing: Callable[[], ApiError]
    ) -> Response:
        """Delete one document; raises ``ApiError``, ``missing`` where there is none."""

        async def attempt() -> Response:
            if (replayed := await self.replayed(mutation)) is not None:
                return replayed
            present = await self._store.document(kind, name)
            if present is None:
                raise missing()
            return await self.apply(
                [Delete(kind=kind, name=name, expected=mutation.expected(present))],
                mutation=mutation,
                action=mutation.action("delete", target),
                status=204,
                shown=lambda _: None,
            )

        return await self.carried_out(attempt)


def store_unavailable(error: StoreUnavailableError) -> ApiError:
    """Return the 503 for a store that can't be used, or that may have made a change."""
    if isinstance(error, OutcomeUnknownError):
        return NoInstanceError(str(error), code="outcome_unknown", retry_after_s=_RETRY_AFTER_S)
    return NoInstanceError(str(error), code="store_unavailable", retry_after_s=_RETRY_AFTER_S)


def _etag(documents: Sequence[Document | None]) -> str:
    return etag(documents[0]) if documents and documents[0] is not None else ""


def _log_later(action: Action, error: StoreUnavailableError) -> None:
    _log.warning(
        "the result of %s %s is not in the audit log yet: %s; it is written later", action.action, action.target, error
    )


def _response(status: int, body: str, headers: Mapping[str, str]) -> Response:
    if not body:
        return Response(status_code=status, headers=dict(headers))
    return Response(body, status_code=status, headers=dict(headers), media_type="application/json")
