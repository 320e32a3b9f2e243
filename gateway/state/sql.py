"""The store over a SQL database.

Both drivers are used blocking, on one thread of their own: the store is read at start and written by people, never by a
client's request, so one connection does, and one code path is tested against both. What differs is in a ``Database``.

A call that has not begun when its time is over is cancelled, so it is never carried out later. One that has begun ends
in bounded time, whatever the database does: its connection is cut from outside. A connection that had died unnoticed is
replaced, and its call made once more.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from gateway.state import statements
from gateway.state.database import CommitUnknownError, Database
from gateway.state.documents import (
    Action,
    AuditBound,
    AuditEntry,
    Change,
    Document,
    Kind,
    OpenAct,
    Remembered,
    Revision,
)
from gateway.state.schema import SchemaError, prepare
from gateway.state.statements import Record
from gateway.state.store import OutcomeUnknownError, Remember, StoreUnavailableError

_Result = TypeVar("_Result")

CALL_LIMIT_S = 5.0


class SqlStore:
    """``Store`` over a ``Database``; ``connect`` is called on the store's thread, again after a failure.

    ``unavailable`` is what the driver raises when the database can't be used; ``limit_s`` bounds the wait of a call,
    and its time once it has begun.
    """

    def __init__(
        self,
        connect: Callable[[], Database],
        *,
        unavailable: tuple[type[Exception], ...],
        audit: AuditBound | None = None,
        limit_s: float = CALL_LIMIT_S,
    ) -> None:
        self._connect = connect
        self._unavailable: tuple[type[Exception], ...] = (*unavailable, SchemaError, CommitUnknownError)
        self._bound = audit or AuditBound()
        self._limit_s = limit_s
        self._database: Database | None = None
        self._begun = 0
        self._cut = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def revision(self) -> Revision:
        return await self._run(statements.revision)

    async def skew_s(self, clock: Callable[[], float]) -> float:
        return await self._run(lambda database: statements.skew_s(database, clock))

    async def documents(self, kind: Kind) -> Sequence[Document]:
        return await self._run(lambda database: statements.documents(database, kind))

    async def document(self, kind: Kind, name: str) -> Document | None:
        return await self._run(lambda database: statements.document(database, kind, name))

    async def begin(self, action: Action, *, lease_s: float) -> int:
        return await self._run(lambda database: statements.begin(database, Record(action, self._bound), lease_s))

    async def note(self, number: int, note: str, *, lease_s: float) -> None:
        await self._run(lambda database: statements.note(database, number, note, lease_s))

    async def hold(self, numbers: Sequence[int], *, lease_s: float) -> None:
        await self._run(lambda database: statements.hold(database, numbers, lease_s))

    async def acts(self) -> Sequence[OpenAct]:
        return await self._run(statements.acts)

    async def take(self, number: int, *, lease_s: float) -> bool:
        return await self._run(lambda database: statements.take(database, number, lease_s))

    async def apply(
        self, changes: Sequence[Change], *, action: Action, remember: Remember | None = None, begun: int | None = None
    ) -> Sequence[Document | None]:
        record = Record(action, self._bound, begun)
        return await self._run(lambda database: statements.apply(database, changes, record, remember))

    async def remembered(self, key: str) -> Remembered | None:
        return await self._run(lambda database: statements.remembered(database, key))

    async def audit(self, *, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        return await self._run(lambda database: statements.audit(database, limit, before, self._bound))

    async def close(self) -> None:
        await asyncio.wrap_future(self._submit(self._drop))
        self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Do it on the store's thread after what was asked before, cut off ``limit_s`` after it has begun."""
        loop = asyncio.get_running_loop()

        def bounded() -> _Result:
            self._begun += 1
            loop.call_soon_threadsafe(loop.call_later, self._limit_s, self._cut_off, self._begun)
            return work()

        return self._thread.submit(bounded)

    async def _run(self, work: Callable[[Database], _Result]) -> _Result:
        """Do it on the store's thread. A change that was begun goes on when the caller is cancelled."""
        call = self._submit(lambda: self._attempt(work))
        answer = asyncio.wrap_future(call)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to look at it
        try:
            ended, _ = await asyncio.wait({answer}, timeout=self._limit_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not ended and call.cancel():
            raise StoreUnavailableError(f"the database has been busy for {self._limit_s:g} s; nothing was changed")
        return await asyncio.shield(answer)

    def _cut_off(self, call: int) -> None:
        """End the connection of a call that still runs, from the event loop's thread."""
        database = self._database
        if self._begun == call and self._cut < call:
            self._cut = call
            if database is not None:
                database.abort()

    def _attempt(self, work: Callable[[Database], _Result]) -> _Result:
        call = self._begun
        try:
            return self._once_more(work, call)
        except self._unavailable as error:
            self._drop()  # whatever state the connection is in, the next call gets a new one
            if isinstance(error, CommitUnknownError):
                raise OutcomeUnknownError(
                    "the connection to the database was lost during the commit; the change may have been made: "
                    "read it, or send the same request again with its Idempotency-Key"
                ) from error
            if self._cut == call:
                raise self._too_late() from error
            raise StoreUnavailableError(f"the database can't be used: {str(error).strip()}") from error
        finally:
            self._begun += 1  # its time is over without effect

    def _once_more(self, work: Callable[[Database], _Result], call: int) -> _Result:
        """Do it, and again on a new connection where one that was kept turns out to be dead."""
        kept = self._database
        try:
            return self._with(self._database or self._opened(call), work)
        except self._unavailable as error:
            if kept is None or not kept.lost or isinstance(error, CommitUnknownError) or self._cut == call:
                raise
        self._drop()
        return self._with(self._opened(call), work)

    def _with(self, database: Database, work: Callable[[Database], _Result]) -> _Result:
        database.check()
        result = work(database)
        database.check()
        return result

    def _opened(self, call: int) -> Database:
        self._database = database = self._connect()
        if self._cut == call:  # there was nothing to cut off yet
            raise self._too_late()
        prepare(database)
        return database

    def _too_late(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the database did not answer within {self._limit_s:g} s; nothing was changed")

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(*self._unavailable):
                database.close()


__all__ = ["CALL_LIMIT_S", "SqlStore"]
