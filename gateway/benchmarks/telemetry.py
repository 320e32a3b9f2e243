"""What it costs to account a request: its marks on the way, and settling it, with and without its log line.

The record is that of a stream that was planned by cost and answered, and whose usage is known: every series of a
request is counted. No trace. Processor time of the thread, the median of several rounds.
"""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.fingerprint import Fingerprint
from gateway.planner import Plan, Planner
from gateway.registry import Instance, InstanceState, LoadTracker
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from gateway.telemetry import Metrics, Outcome, RequestRecord, Telemetry
from gateway.telemetry.logs import formatter
from gateway.types import Operation, RequestId, TenantId, Usage
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex

_COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02)
_MARKS = ("received_s", "parsed_s", "fingerprinted_s", "admitted_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryPlan:
    """Requests in a round, and rounds."""

    requests: int = 20_000
    rounds: int = 7


def run(plan: TelemetryPlan) -> dict[str, float]:
    """Return microseconds by name."""
    planned = _plan()
    telemetry = Telemetry(Metrics())
    record = _record(planned)
    log = logging.getLogger("gateway.request")
    kept, log.propagate = (log.level, log.propagate), False
    line = logging.StreamHandler(_Nowhere())
    line.setFormatter(formatter("json"))
    log.addHandler(line)
    try:
        log.setLevel(logging.WARNING)
        settle_us = _median_us(lambda: telemetry.settle(record), plan)
        log.setLevel(logging.INFO)
        logged_us = _median_us(lambda: telemetry.settle(record), plan)
    finally:
        log.removeHandler(line)
        log.setLevel(kept[0])
        log.propagate = kept[1]
    marks_us = _median_us(lambda: _mark(record), plan)
    return {
        "marks_us_per_request": marks_us,
        "settle_us_per_request": settle_us,
        "metrics_us_per_request": marks_us + settle_us,
        "log_line_us_per_request": logged_us - settle_us,
    }


class _Nowhere:
    """A stream that forgets."""

    def write(self, _: str) -> None:
        """Take a line."""

    def flush(self) -> None:
        """Nothing is kept."""


def _mark(record: RequestRecord) -> None:
    for name in _MARKS:
        setattr(record, name, time.monotonic())


def _record(plan: Plan) -> RequestRecord:
    now_s = time.monotonic()
    record = RequestRecord(
        operation=Operation.CHAT,
        request_id=RequestId("0123456789abcdef"),
        started_s=now_s - 1,
        tenant=TenantId("acme"),
        model="m",
        stream=True,
    )
    record.received_s = record.parsed_s = record.fingerprinted_s = record.admitted_s = now_s - 0.999
    record.planned(plan)
    record.sent_s = now_s - 0.998
    record.first_byte_s = now_s - 0.9
    record.status = 200
    record.outcome = Outcome.OK
    record.usage = Usage(prompt_tokens=1_000, completion_tokens=50, cached_tokens=800)
    return record


def _plan() -> Plan:
    index = FleetIndex()
    planner = Planner(
        policy=POLICIES["cost_aware"](_COSTS),
        index=index,
        load=LoadTracker(),
        recent=RecentRoutes(lifetime_s=10),
        learned=LearnedAffinity(index, capacity_tokens=1 << 20),
        calibration=Calibration(_COSTS),
        clock=time.monotonic,
    )
    instances = [
        Instance(id=InstanceId(name), url=f"http://{name}", state=InstanceState.HEALTHY, reason="", models=())
        for name in ("a", "b")
    ]
    prompt = Fingerprint(token_bytes(list(range(1_000))), model="m", salt="s")
    first = planner.plan(prompt, instances)
    planner.computed(first)
    plan = planner.plan(prompt, instances)
    # As of an instance that announces its blocks, in two tiers.
    candidate = plan.decision.candidate._replace(tokens_by_tier={CacheTier.HBM: 512, CacheTier.DDR: 256})
    return replace(plan, decision=replace(plan.decision, candidate=candidate), matched_tokens=768)


def _median_us(step: Callable[[], None], plan: TelemetryPlan) -> float:
    times = []
    for _ in range(plan.rounds):
        started = time.thread_time()
        for _ in range(plan.requests):
            step()
        times.append((time.thread_time() - started) / plan.requests)
    return statistics.median(times) * 1e6


__all__ = ["TelemetryPlan", "run"]
