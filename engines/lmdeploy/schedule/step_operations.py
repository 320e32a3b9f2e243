"""``GET /kv/v1/steps`` in the engine process and on the api_server: the selected part of the timeline."""

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engines.control.errors import RefusedError
from engines.control.operations import Operation
from engines.control.routes import Ask, answered, whole_number
from engines.lmdeploy.schedule.step_metrics import StepCounts
from engines.lmdeploy.schedule.step_timeline import StepTimeline
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.steps import KEPT_STEPS, STEPS_PATH, StepsQuery, StepsReport, StepTotals, summarize

STEPS: Final = b"steps"


class StepOperations:
    """One engine's; any thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def timeline(self) -> StepTimeline | None:
        """The engine's, None until its loop begins."""
        return timeline_of(self._engine.scheduler)

    def counts(self) -> StepCounts | None:
        """Return the source of the metrics on ``/metrics``."""
        timeline = self.timeline
        return None if timeline is None else timeline.counts()

    def table(self) -> dict[bytes, Operation]:
        """Return the operations by name."""
        return {STEPS: self._show}

    def _show(self, body: bytes) -> bytes:
        query = _query(body)
        timeline = self.timeline
        if timeline is None:
            report = StepsReport(clock="wall", totals=StepTotals(), lost=0, summary=summarize([]), steps=[])
        else:
            report = timeline.report(query)
        return msgspec.json.encode(report)


def mount_step_routes(app: FastAPI, ask: Ask) -> None:
    """Add ``GET /kv/v1/steps``; its query is the operation's body."""

    async def show(request: Request) -> Response:
        query = {name: whole_number(text) for name, text in request.query_params.items()}
        return await answered(ask, STEPS, msgspec.json.encode(query))

    app.add_api_route(STEPS_PATH, show, methods=["GET"], response_model=None, tags=["kv"])


def _query(body: bytes) -> StepsQuery:
    allowed = f"last: 0 to {KEPT_STEPS} steps; after: the number of a step, 0 for all"
    try:
        query = msgspec.json.decode(body or b"{}", type=StepsQuery)
    except UNREADABLE as error:
        raise RefusedError(f"the query is not valid: {error}; allowed: {allowed}") from error
    if not 0 <= query.last <= KEPT_STEPS or query.after < 0:
        raise RefusedError(f"the query has last={query.last} and after={query.after}; allowed: {allowed}")
    return query
