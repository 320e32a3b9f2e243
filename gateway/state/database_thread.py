"""One connection to a database, used blocking on a thread of its own, with bounds on every call.

A call that has not begun when its time is over is cancelled, so it is never carried out later. A call that has begun
ends in bounded time, also while the database hangs: the event loop cuts its connection. A connection that died
unnoticed is replaced, and its call is made once more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from gateway.state.budget import store_time
from gateway.state.database import CommitUnknownError, Database
from gateway.state.schema import SchemaError, prepare
from gateway.state.store import OutcomeUnknownError, StoreUnavailableError

_Result = TypeVar("_Result")


class DatabaseThread:
    """``connect`` runs on the thread, again after a failure. ``unavailable`` are the driver's errors for an unusable
    database; ``limit_s`` bounds the wait of a call, and its time once it has begun.
    """

    def __init__(
        self, connect: Callable[[], Database], *, unavailable: tuple[type[Exception], ...], limit_s: float
    ) -> None:
        self._connect = connect
        self._unavailable: tuple[type[Exception], ...] = (*unavailable, SchemaError, CommitUnknownError)
        self._limit_s = limit_s
        self._database: Database | None = None
        self._begun = 0
        self._cut = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def close(self) -> None:
        await asyncio.wrap_future(self._submit(self._drop))
        self._thread.shutdown(wait=False)

    def _submit(self, work: Callable[[], _Result]) -> "Future[_Result]":
        """Queue a call for the store's thread; it is cut off ``limit_s`` after it has begun."""
        loop = asyncio.get_running_loop()

        def bounded() -> _Result:
            self._begun += 1
            loop.call_soon_threadsafe(loop.call_later, self._limit_s, self._cut_off, self._begun)
            return work()

        return self._thread.submit(bounded)

    async def run(self, work: Callable[[Database], _Result]) -> _Result:
        """Return the result of ``work``. A change that has begun continues when the caller is cancelled.

        Raises ``StoreUnavailableError``, also when the calls that share their time have used it up.
        """
        time, clock = store_time(), asyncio.get_running_loop().time
        left_s = self._limit_s - time.spent_s
        if left_s <= 0:
            raise StoreUnavailableError(
                f"the database took more than {self._limit_s:g} s for earlier calls; this call was not made"
            )
        begun_s = clock()
        try:
            return await self._answer(work, within_s=left_s)
        finally:
            time.spent_s += clock() - begun_s

    async def _answer(self, work: Callable[[Database], _Result], *, within_s: float) -> _Result:
        call = self._submit(lambda: self._attempt(work))
        answer = asyncio.wrap_future(call)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be cancelled
        try:
            ended, _ = await asyncio.wait({answer}, timeout=within_s)
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
            self._drop()  # the next call gets a new connection
            if isinstance(error, CommitUnknownError):
                raise OutcomeUnknownError(
                    "the connection to the database was lost during the commit; the change may have been made: "
                    "read it, or send the same request again with its Idempotency-Key"
                ) from error
            if self._cut == call:
                raise self._too_late() from error
            raise StoreUnavailableError(f"the database can't be used: {str(error).strip()}") from error
        finally:
            self._begun += 1  # its cut-off has no effect any more

    def _once_more(self, work: Callable[[Database], _Result], call: int) -> _Result:
        """Do the work, and again on a new connection where the kept one was dead."""
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
        if self._cut == call:  # the cut-off came before the connection
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
