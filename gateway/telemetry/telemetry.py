"""The end of a request as numbers and as one wide log line."""

import logging
from collections import Counter
from http import HTTPStatus
from time import monotonic

from gateway.telemetry.logs import FIELDS
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import Outcome, RequestRecord
from kvcontrol.core.ids import InstanceId

_log = logging.getLogger("gateway.request")


class Telemetry:
    """Writes metrics and the request log; also the meter of the event feeds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.outcomes: Counter[Outcome] = Counter()

    def settle(self, record: RequestRecord) -> None:
        """Account one finished request."""
        outcome = record.outcome or Outcome.GATEWAY_ERROR
        now_s = monotonic()
        metrics = self._metrics
        self.outcomes[outcome] += 1
        metrics.requests.labels(record.operation, outcome).inc()
        metrics.duration.labels(record.operation).observe(now_s - record.started_s)
        if record.first_byte_s is not None:
            metrics.first_byte.labels(record.operation).observe(record.first_byte_s - record.started_s)
        if record.plan is not None:
            decision = record.plan.decision
            metrics.routing.labels(record.plan.policy, decision.basis, decision.reason).inc()
            metrics.matched_tokens.inc(record.plan.matched_tokens)
            self._judge(record, record.plan.predicted_s)
            metrics.overestimated_tokens.inc(record.overestimated_tokens)
        if record.usage is not None:
            metrics.prompt_tokens.inc(record.usage.prompt_tokens)
            metrics.completion_tokens.inc(record.usage.completion_tokens)
            metrics.cached_tokens.inc(record.usage.cached_tokens or 0)
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s %s", record.operation, outcome, extra={FIELDS: _fields(record, now_s)})

    def waited(self, seconds: float) -> None:
        self._metrics.queue_wait.observe(seconds)

    def shed(self, reason: str) -> None:
        self._metrics.shed.labels(reason).inc()

    def _judge(self, record: RequestRecord, predicted_s: float | None) -> None:
        """Compare the predicted time to the first token with what it was: only of streams that have one."""
        answered = record.status is not None and record.status < HTTPStatus.BAD_REQUEST
        if predicted_s is None or record.first_byte_s is None or not (record.stream and answered):
            return
        real_s = record.first_byte_s - record.sent_s
        self._metrics.ttft_predicted.observe(predicted_s)
        self._metrics.ttft_real.observe(real_s)
        self._metrics.ttft_error.observe(abs(predicted_s - real_s))

    def retried(self, cause: str) -> None:
        self._metrics.retries.labels(cause).inc()

    def joined(self, instance: InstanceId) -> None:
        """Begin an instance's series: one that exists only after its first event can't be alarmed on."""
        self._metrics.events.labels(instance)
        self._metrics.undecodable.labels(instance)

    def left(self, instance: InstanceId) -> None:
        """End the series of an instance that is gone."""
        self._metrics.forget(instance)

    def events(self, instance: InstanceId, applied: int, undecodable: int) -> None:
        self._metrics.events.labels(instance).inc(applied)
        if undecodable:
            self._metrics.undecodable.labels(instance).inc(undecodable)

    def resync(self, instance: InstanceId, reason: str) -> None:
        self._metrics.resyncs.labels(instance, reason).inc()

    def loop_failed(self, name: str) -> None:
        self._metrics.loop_failures.labels(name.partition(":")[0]).inc()


def _fields(record: RequestRecord, now_s: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "stream": record.stream,
        "status": record.status,
        "detail": record.detail,
        "seconds": round(now_s - record.started_s, 4),
        "first_byte_s": None if record.first_byte_s is None else round(record.first_byte_s - record.started_s, 4),
    }
    if record.plan is not None:
        fields |= {"instance": record.plan.instance.id, "route": record.route, "attempts": record.attempts}
        if record.plan.predicted_s is not None:
            fields["predicted_s"] = round(record.plan.predicted_s, 4)
    fields["fingerprint_tokens"] = record.prompt_tokens
    if record.usage is not None:
        fields |= {
            "prompt_tokens": record.usage.prompt_tokens,
            "completion_tokens": record.usage.completion_tokens,
            "cached_tokens": record.usage.cached_tokens,
        }
    return {key: value for key, value in fields.items() if value is not None}


__all__ = ["Telemetry"]
