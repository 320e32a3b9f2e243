"""The end of a request as numbers and as one wide log line."""

import logging
from collections import Counter
from time import monotonic

from gateway.http.status import BAD_REQUEST
from gateway.telemetry.logs import FIELDS
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.telemetry.traffic import Traffic
from gateway.types import Usage
from kvcontrol.core.ids import InstanceId

_log = logging.getLogger("gateway.request")


class Telemetry:
    """Writes metrics and the request log; also the meter of the event feeds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.outcomes: Counter[Outcome] = Counter()
        self.traffic = Traffic()

    def settle(self, record: RequestRecord) -> None:
        """Account one finished request."""
        outcome = record.outcome or Outcome.GATEWAY_ERROR
        now_s = monotonic()
        metrics, operation, trace_id = self._metrics, record.operation, record.trace_id
        self.outcomes[outcome] += 1
        self.traffic.settled(record, outcome)
        metrics.requests.inc(operation, outcome)
        metrics.model_requests.inc(metrics.model(record.model), outcome)
        tenant = metrics.tenant(record.tenant)
        metrics.tenant_requests.inc(tenant, outcome)
        metrics.duration.observe(now_s - record.started_s, operation, trace_id=trace_id)
        if record.first_byte_s is not None:
            metrics.first_byte.observe(record.first_byte_s - record.started_s, operation, trace_id=trace_id)
        self._stages(record)
        if record.plan is not None:
            decision = record.plan.decision
            metrics.routing.inc(record.plan.policy, decision.basis, decision.reason)
            if record.plan.split is not None:
                metrics.separations.inc(record.plan.split.reason)
            if record.plan.prefill is not None and record.answering_s is not None:
                waited_s = record.answering_s - record.sent_s
                metrics.separated_prefill.observe(waited_s, trace_id=trace_id)
            metrics.matched_tokens.inc(by=record.plan.matched_tokens)
            for tier, tokens in decision.candidate.tokens_by_tier.items():
                metrics.matched_tier_tokens.inc(tier, by=tokens)
            self._score_prediction(record, record.plan.predicted_s)
            metrics.overestimated_tokens.inc(by=record.overestimated_tokens)
        if record.usage is not None:
            self._used(record, record.usage, tenant, now_s)
        if record.trace is not None:
            record.trace.ended(outcome, now_s)
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s %s", operation, outcome, extra={FIELDS: _fields(record, outcome, now_s)})

    def _stages(self, record: RequestRecord) -> None:
        """Count what each step before sending took, as far as the request came; the plan of a first attempt only."""
        begun_s = record.started_s
        for stage, ended_s in (
            ("receive", record.received_s),
            ("parse", record.parsed_s),
            ("fingerprint", record.fingerprinted_s),
            ("admission", record.admitted_s),
            ("plan", record.sent_s if record.attempts == 1 else None),
        ):
            if ended_s is None:
                return
            self._metrics.stage.observe(ended_s - begun_s, stage)
            begun_s = ended_s

    def _used(self, record: RequestRecord, usage: Usage, tenant: str, now_s: float) -> None:
        metrics, cached = self._metrics, usage.cached_tokens or 0
        metrics.prompt_tokens.inc(by=usage.prompt_tokens)
        metrics.completion_tokens.inc(by=usage.completion_tokens)
        metrics.cached_tokens.inc(by=cached)
        metrics.tenant_tokens.inc(tenant, "prompt", by=usage.prompt_tokens)
        metrics.tenant_tokens.inc(tenant, "completion", by=usage.completion_tokens)
        metrics.tenant_tokens.inc(tenant, "cached", by=cached)
        if record.stream and record.first_byte_s is not None and usage.completion_tokens > 1:
            between_s = (now_s - record.first_byte_s) / (usage.completion_tokens - 1)
            metrics.time_per_token.observe(between_s, record.operation, trace_id=record.trace_id)

    def waited(self, seconds: float) -> None:
        self._metrics.queue_wait.observe(seconds)

    def paused(self, seconds: float) -> None:
        """Between two pieces of a stream; called for each of them."""
        self._metrics.between_tokens.observe(seconds)

    def shed(self, reason: str) -> None:
        self._metrics.shed.inc(reason)

    def _score_prediction(self, record: RequestRecord, predicted_s: float | None) -> None:
        """Compare the predicted time to the first token with what it was: only of streams that have one."""
        answered = record.status is not None and record.status < BAD_REQUEST
        if predicted_s is None or record.first_byte_s is None or not (record.stream and answered):
            return
        real_s = record.first_byte_s - record.sent_s
        self._metrics.ttft_predicted.observe(predicted_s)
        self._metrics.ttft_real.observe(real_s, trace_id=record.trace_id)
        self._metrics.ttft_error.observe(abs(predicted_s - real_s))

    def retried(self, cause: str) -> None:
        self._metrics.retries.inc(cause)

    def joined(self, instance: InstanceId) -> None:
        """Begin an instance's series: one that exists only after its first event can't be alarmed on."""
        self._metrics.events.begin(instance)
        self._metrics.undecodable.begin(instance)

    def left(self, instance: InstanceId) -> None:
        """End the series of an instance that is gone."""
        self._metrics.forget(instance)

    def events(self, instance: InstanceId, applied: int, undecodable: int) -> None:
        self._metrics.events.inc(instance, by=applied)
        if undecodable:
            self._metrics.undecodable.inc(instance, by=undecodable)

    def resync(self, instance: InstanceId, reason: str) -> None:
        self._metrics.resyncs.inc(instance, reason)

    def lagged(self, seconds: float) -> None:
        self._metrics.loop_lag.observe(seconds)

    def loop_failed(self, name: str) -> None:
        self._metrics.loop_failures.inc(name.partition(":")[0])


def _fields(record: RequestRecord, outcome: Outcome, now_s: float) -> dict[str, object]:
    """A request's log line; docs/operations.md lists the names. What isn't known has none."""
    started_s = record.started_s
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "operation": record.operation.value,
        "outcome": outcome.value,
        "tenant": record.tenant,
        "model": record.model,
        "stream": record.stream,
        "status": record.status,
        "detail": record.detail,
        "seconds": round(now_s - started_s, 4),
        "first_byte_s": None if record.first_byte_s is None else round(record.first_byte_s - started_s, 4),
    }
    if record.admitted_s is not None and record.fingerprinted_s is not None:
        fields["queued_s"] = round(record.admitted_s - record.fingerprinted_s, 4)
    plan = record.plan
    if plan is not None:
        fields |= {
            "instance": plan.instance.id,
            "route": record.route,
            "attempts": record.attempts,
            "matched_tokens": plan.matched_tokens,
        }
        if plan.predicted_s is not None:
            fields["predicted_s"] = round(plan.predicted_s, 4)
    fields["fingerprint_tokens"] = record.prompt_tokens
    if record.usage is not None:
        fields |= {
            "prompt_tokens": record.usage.prompt_tokens,
            "completion_tokens": record.usage.completion_tokens,
            "cached_tokens": record.usage.cached_tokens,
        }
    return {key: value for key, value in fields.items() if value is not None}
