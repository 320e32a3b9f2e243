"""Parses a request in stages: cheap refusals first, then long work in threads.

What a long body costs is bounded on its way: its tenant's requests a minute and at the same time before it is read, its
shape before anything is made of it (``api.shape``), its length in tokens before it is tokenized. A short one is read at
once, and its tenant's quotas are asked once, when it is known what it takes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from gateway.admission import AdmissionController, Held
from gateway.admission.fair_threads import FairThreads
from gateway.fingerprint import Fingerprint, Fingerprinter, Gap
from gateway.http.body_memory import BodyMemory, BodyReservation
from gateway.http.content_encoding import Decoding, coding_of, decode
from gateway.http.exchange import Exchange
from gateway.registry import Registry
from gateway.requests.call import Call, parse_call
from gateway.requests.estimate import least_tokens
from gateway.types import Operation, Tenant

INLINE_BYTES: Final = 192 << 10
"""Up to here a body is read on the event loop: 40 ms for the worst shape, and mostly half of one."""

_INLINE_ENCODED_BYTES: Final = 4 << 10
"""The same of a compressed one, which may grow to 128 times its length."""
_DECODED_AT_ONCE_BYTES: Final = 8 << 20
"""As much of a long compressed body is counted before it is decoded."""


class Received(NamedTuple):
    """A request's body as it came; ``coding`` is its encoding, None where it has none."""

    body: bytes
    coding: bytes | None
    reserved: BodyReservation

    @property
    def is_long(self) -> bool:
        """Whether to read it is more than the event loop may do at once."""
        return len(self.body) > (INLINE_BYTES if self.coding is None else _INLINE_ENCODED_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingLimits:
    """Bounds on what is read of one request."""

    max_body_bytes: int
    body_timeout_s: float
    max_answers: int


class Reader:
    """Stateless but for what its parts count."""

    def __init__(  # noqa: PLR0913 - its parts, by name
        self,
        *,
        limits: ReadingLimits,
        memory: BodyMemory,
        threads: FairThreads,
        fingerprinter: Fingerprinter,
        admission: AdmissionController,
        registry: Registry,
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._threads = threads
        self._fingerprinter = fingerprinter
        self._admission = admission
        self._registry = registry

    def reserve_body(self, tenant: Tenant) -> BodyReservation:
        """Return what a request's bytes are counted with; whoever gets it gives it back."""
        return self._memory.reserve(tenant.id)

    async def receive(self, exchange: Exchange, reserved: BodyReservation) -> Received:
        """Return a request's body as it came.

        Raises ``ApiError`` for one that is too long, too slow, too much with others, or in an unknown encoding.
        """
        limits = self._limits
        coding = coding_of(exchange.headers) if exchange.header(b"content-encoding") is not None else None
        body = await exchange.read_body(
            limit_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s, take=reserved.take
        )
        return Received(body, coding, reserved)

    async def hold(self, tenant: Tenant, received: Received) -> Held:
        """Take a request and a place of the tenant's quotas where it is long work to find out what else is asked."""
        return await self._admission.quotas.hold(tenant, is_long=received.is_long)

    async def decoded(self, received: Received, tenant: Tenant) -> bytes:
        """Return an encoded body without its encoding; raises ``ApiError`` for one that is damaged or too long."""
        data, coding, reserved = received
        if coding is None:
            return data
        limit = self._limits.max_body_bytes
        if not received.is_long:
            body = decode(data, coding, limit_bytes=limit)
            reserved.take(len(body))
            return body
        decoding = Decoding(data, coding, limit_bytes=limit)
        while not decoding.ended:
            before = decoding.decoded_bytes
            reserved.take(_DECODED_AT_ONCE_BYTES)
            work = partial(decoding.advance, _DECODED_AT_ONCE_BYTES)
            await self._threads.run(work, tenant=tenant, size_bytes=_DECODED_AT_ONCE_BYTES)
            reserved.give_back_some(_DECODED_AT_ONCE_BYTES - (decoding.decoded_bytes - before))
        return await self._threads.run(decoding.decoded, tenant=tenant, size_bytes=decoding.decoded_bytes)

    async def parse(self, operation: Operation, body: bytes, tenant: Tenant) -> Call:
        """Return what a body asks for; raises ``InvalidRequestError``."""
        most = self._limits.max_answers
        if self._registry.checks.unchecked:
            await self._registry.checks.until_checked()
        if len(body) <= INLINE_BYTES:
            return parse_call(operation, body, models=self._registry.models.names, most_answers=most)
        served = self._registry.models.names()
        work = partial(parse_call, operation, body, models=lambda: served, most_answers=most)
        return await self._threads.run(work, tenant=tenant, size_bytes=len(body))

    async def fingerprint(self, call: Call, tenant: Tenant, session: bytes | None) -> Fingerprint | Gap:
        """Return the fingerprint of a request's prompt, that of its session where it has none, or why there is neither.

        Raises ``ContextLengthError`` for a prompt that is too long by far, without tokenizing it.
        """
        if len(call.body) > INLINE_BYTES:
            self._admission.check_length(
                tenant, call.model, least_tokens=least_tokens(call), output_tokens=max(0, call.answer_tokens or 0)
            )
        size = len(call.body)
        found = await self._fingerprinter.fingerprint(
            call.prompt, size_bytes=size, model=call.model, tenant=tenant, fields=call.body.count(b":", 0, INLINE_BYTES)
        )
        if not isinstance(found, Gap) or found is Gap.NO_GENERATION or session is None:
            return found
        return Fingerprint.of_session(session, size_bytes=size, model=call.model, salt=tenant.salt, gap=found)
