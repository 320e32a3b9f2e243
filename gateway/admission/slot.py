"""The admission slot of one request: its demand, its reservation, and its final cost."""

from collections.abc import Callable
from math import ceil
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self

from gateway.admission.fair_queue import FairQueue
from gateway.admission.quota import Demand, Granted, QuotaMeter, Standing
from gateway.admission.urgent import Urgent
from gateway.http.status import BAD_REQUEST, INTERNAL_SERVER_ERROR
from gateway.registry import Instance
from gateway.types import Tenant, Usage
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.priority import Priority

_OUTPUT_WORK: Final = 2.0
"""A completion token costs an engine about as much as two prompt tokens, as VTC's authors have it."""

_MOST_WORK: Final = 1e8

Header = tuple[bytes, bytes]


class AdmissionRequest(NamedTuple):
    """What a request wants. ``output_tokens`` is what it asks for, or 0 when it doesn't say; ``expected_output_tokens``
    is what is reserved then. An engine runs ``answers`` sequences for it, of ``prompts`` different prompts.
    """

    tenant: Tenant
    model: str
    prompt_tokens: int
    output_tokens: int
    expected_output_tokens: int
    prompts: int = 1
    answers: int = 1

    @property
    def tokens(self) -> int:
        """Context tokens of the request, as far as known."""
        return self.prompt_tokens + self.output_tokens

    @property
    def reserved_tokens(self) -> int:
        return self.prompt_tokens + (self.output_tokens or self.expected_output_tokens)

    @property
    def demand(self) -> Demand:
        """Its demand on the tenant's quotas: one request for each prompt, one slot for each answer."""
        return Demand(requests=self.prompts, tokens=self.reserved_tokens, places=self.answers)

    @property
    def work(self) -> float:
        """Its expected cost for an engine, in prompt tokens; bounded, so that no value distorts the counters."""
        return work_of(self.prompt_tokens, self.output_tokens or self.expected_output_tokens)


def work_of(prompt_tokens: int, output_tokens: int) -> float:
    """Return the cost of a request for an engine, in prompt tokens, at most ``_MOST_WORK``."""
    return min(_MOST_WORK, prompt_tokens + _OUTPUT_WORK * output_tokens)


class Unplaced(Protocol):
    """Counts the places of admitted requests for which no instance has been chosen yet."""

    def placed(self, places: int) -> None:
        """Note that so many places count at an instance now, or have ended; called once."""


class AdmissionSlot:
    """Owned by the request; every part of it is given back exactly once, at the latest when it is closed, as ``with``
    does it. ``closed`` is called with its model then: another request may be admitted.

    What an end costs: an answer with usage costs that. One that began and whose usage nobody knows (the client left)
    costs what was reserved. An engine's 4xx costs its requests and no tokens. Everything else costs nothing.
    """

    def __init__(
        self,
        request: AdmissionRequest,
        granted: Granted | None,
        quotas: QuotaMeter,
        closed: Callable[[str], None] | None = None,
    ) -> None:
        self._request = request
        self._closed = closed
        self._granted = granted
        self._quotas = quotas
        self._queue: FairQueue | None = None
        self._unplaced: Unplaced | None = None
        self.instances: tuple[Instance, ...] = ()
        self.served_as = request.tenant.limits.priority  # higher, where it has risen by waiting
        self._began = False
        self._urgent: Urgent | None = None
        self._counts_at: InstanceId | None = None
        self.headers: tuple[Header, ...] = () if granted is None else self.headers_of(granted.requests, granted.tokens)

    def begin(
        self, queue: FairQueue, instances: tuple[Instance, ...], unplaced: Unplaced, served_as: Priority, urgent: Urgent
    ) -> None:
        """The request is admitted: it may be sent to ``instances`` now, as a request of class ``served_as``; ``urgent``
        counts it where it waits for its answer when that class is the highest.
        """
        self.served_as = served_as
        self._queue = queue
        self.instances = instances
        self._unplaced = unplaced
        self._urgent = urgent if served_as is Priority.HIGH else None

    def placed(self, instance: InstanceId | None = None) -> None:
        """It counts at an instance from now on (and at no other that it was at), or at none. Idempotent."""
        unplaced, self._unplaced = self._unplaced, None
        if unplaced is not None:
            unplaced.placed(self._request.answers)
        if self._urgent is not None:
            if self._counts_at is not None:
                self._urgent.went(self._counts_at)
            if instance is not None:
                self._urgent.came(instance)
            self._counts_at = instance

    def began(self) -> None:
        """Its answer has begun: from now on it costs something."""
        self._began = True
        self.placed()

    def settle(self, status: int, usage: Usage | None) -> None:
        """Record the end of the answer; ``usage`` is None if the engine reports none."""
        if status >= INTERNAL_SERVER_ERROR:
            self._end(requests=0, tokens=0, work=0.0)
        elif status >= BAD_REQUEST:
            self._end(requests=self._request.prompts, tokens=0, work=0.0)
        elif usage is not None:
            self._end(
                requests=self._request.prompts,
                tokens=usage.prompt_tokens + usage.completion_tokens,
                work=work_of(usage.prompt_tokens, usage.completion_tokens),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the rest of the reservation. Idempotent."""
        self.placed()
        if self._began:
            self._end(requests=self._request.prompts, tokens=self._request.reserved_tokens, work=self._request.work)
        else:
            self._end(requests=0, tokens=0, work=0.0)
        closed, self._closed = self._closed, None
        if closed is not None:
            closed(self._request.model)

    def _end(self, *, requests: int, tokens: int, work: float) -> None:
        granted, self._granted = self._granted, None
        if granted is not None:
            self._quotas.settle(granted.reservation, requests=requests, tokens=tokens)
        queue, self._queue = self._queue, None
        if queue is not None:
            tenant = self._request.tenant
            queue.correct(tenant.id, tenant.limits.weight, work - self._request.work)

    @staticmethod
    def headers_of(requests: Standing | None, tokens: Standing | None) -> tuple[Header, ...]:
        """Return OpenAI's ``x-ratelimit-*`` headers."""
        headers: list[Header] = []
        for name, each in ((b"requests", requests), (b"tokens", tokens)):
            if each is not None:
                headers += [
                    (b"x-ratelimit-limit-" + name, str(each.limit).encode()),
                    (b"x-ratelimit-remaining-" + name, str(each.remaining).encode()),
                    (b"x-ratelimit-reset-" + name, f"{ceil(each.reset_s)}s".encode()),
                ]
        return tuple(headers)
