"""Reading requests: what is cheap to refuse is refused first, and long work leaves the event loop."""

import asyncio
import gzip
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from time import monotonic
from typing import Any

import msgspec
import pytest

from gateway.admission import AdmissionController, ConcurrencyLimiter, LocalQuotaMeter, QueueRules
from gateway.admission.fair_threads import FairThreads
from gateway.errors import ContextLengthError, InvalidRequestError, RateLimitedError
from gateway.fingerprint import Fingerprint, Fingerprinter, ModelTokenizer
from gateway.http.body_memory import TIMES, BodyMemory
from gateway.limits import SloClass, TenantLimits
from gateway.registry import InstanceSpec, LoadTracker, Model, ProbeResult, Registry
from gateway.registry.checks import CheckRules
from gateway.requests.call import Call, parse_call
from gateway.requests.reader import INLINE_BYTES, Reader, ReadingLimits, Received
from gateway.types import Operation, Tenant, TenantId
from kvcontrol.core.ids import InstanceId
from tests.unit.gateway.admission.test_controller import Meter
from tests.unit.gateway.admission.test_limiter import reporting

LIMIT_S = 30.0
STATS = reporting().stats
LONG = "word " * 60_000


@dataclass
class Desk:
    reader: Reader
    quotas: LocalQuotaMeter
    threads: FairThreads
    registry: Registry

    def up(self, **fields: Any) -> None:
        probe = ProbeResult(models=(Model(id="m", card={}),), stats=None, stats_problem=None, in_flight=0)
        self.registry.checks.succeeded(InstanceId("a"), replaced(probe, **fields))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    with desk_of(None) as made:
        made.up()
        yield made


@contextmanager
def desk_of(tokenizer: ModelTokenizer | None) -> Iterator[Desk]:
    """One with one thread, whose instance hasn't been asked yet."""
    registry = Registry([InstanceSpec(id=InstanceId("a"), url="http://a")], rules=CheckRules(unhealthy_after=1))
    quotas = LocalQuotaMeter(monotonic)
    admission = AdmissionController(
        registry=registry,
        load=LoadTracker(),
        quotas=quotas,
        limiter=ConcurrencyLimiter(most=8, slow_s=60.0, clock=monotonic),
        rules=QueueRules(bound=9, ageing_s=9.0, deadlines_s=dict.fromkeys(SloClass, LIMIT_S)),
        meter=Meter(),
        clock=monotonic,
    )
    memory = BodyMemory(1 << 29, shed=Meter().shed)
    with FairThreads(1, memory=memory, bound=9, ageing_s=9.0, clock=monotonic) as threads:
        reader = Reader(
            limits=ReadingLimits(max_body_bytes=1 << 26, body_timeout_s=1.0, max_answers=8),
            memory=memory,
            threads=threads,
            fingerprinter=Fingerprinter(tokenizer, threads),
            admission=admission,
            registry=registry,
        )
        made = Desk(reader, quotas, threads, registry)
        yield made


def tenant(**limits: Any) -> Tenant:
    return Tenant(id=TenantId("acme"), salt="s", limits=TenantLimits(**limits))


def body(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def received(desk: Desk, size: int, coding: bytes | None = None) -> Received:
    return Received(b"x" * size, coding, desk.reader.reserve_body(tenant()))


async def parsed(desk: Desk, text: str) -> Call:
    return await desk.reader.parse(Operation.CHAT, body(text), tenant())


async def test_a_long_body_is_read_in_the_threads_and_a_short_one_at_once(desk: Desk) -> None:
    gate = threading.Event()
    taken = asyncio.create_task(desk.threads.run(lambda: gate.wait(LIMIT_S), tenant=tenant(), size_bytes=1))
    await asyncio.sleep(0)
    long = asyncio.create_task(parsed(desk, LONG))
    try:
        async with asyncio.timeout(LIMIT_S):
            while desk.threads.waiting != 1:
                await asyncio.sleep(0)
        assert (await parsed(desk, "short")).model == "m"
        assert not long.done()
    finally:
        gate.set()
    async with asyncio.timeout(LIMIT_S):
        assert (await long).model == "m"
        await taken


async def test_a_long_body_takes_a_request_and_a_place_before_it_is_read_and_a_short_one_none(desk: Desk) -> None:
    who = tenant(requests_per_min=1, concurrency=5)
    with await desk.reader.hold(who, received(desk, INLINE_BYTES)):
        assert (await desk.quotas.usage(who.id)).requests == 0
    with await desk.reader.hold(who, received(desk, INLINE_BYTES + 1)):
        assert (await desk.quotas.usage(who.id)).running == 1
        with pytest.raises(RateLimitedError, match="1 requests a minute"):
            await desk.reader.hold(who, received(desk, INLINE_BYTES + 1))
    usage = await desk.quotas.usage(who.id)
    assert (usage.requests, usage.running) == (0, 0)


async def test_a_compressed_body_takes_a_place_before_and_counts_with_all_that_it_becomes(desk: Desk) -> None:
    who = tenant(concurrency=1)
    plain = b"".join(b"%d " % number for number in range(100_000))
    packed = gzip.compress(plain)
    room = desk.reader.reserve_body(who)
    room.take(len(packed))
    with await desk.reader.hold(who, Received(packed, b"gzip", room)):
        with pytest.raises(RateLimitedError, match="at the same time"):
            await desk.reader.hold(who, received(desk, 5000, b"gzip"))
        assert await desk.reader.decoded(Received(packed, b"gzip", room), who) == plain
    assert room._size == TIMES * (len(packed) + len(plain))
    room.give_back()


async def test_a_compressed_body_is_refused_on_its_way_where_what_it_becomes_has_no_room(desk: Desk) -> None:
    who = tenant()
    packed = gzip.compress(b"".join(b"%d " % number for number in range(4_000_000)), 1)
    held = desk.reader.reserve_body(replaced(who, id=TenantId("other")))
    held.take(50 << 20)
    room = desk.reader.reserve_body(who)
    room.take(len(packed))
    tracemalloc.start()
    try:
        with pytest.raises(RateLimitedError, match="saturated"):
            await desk.reader.decoded(Received(packed, b"gzip", room), who)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    room.give_back()
    held.give_back()
    assert desk.reader._memory.held_bytes == 0


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.COMPLETIONS])
async def test_a_prompt_that_is_too_long_by_far_is_refused_before_it_is_tokenized(
    desk: Desk, operation: Operation
) -> None:
    said = {"model": "m", "messages": [{"role": "user", "content": LONG}], "prompt": LONG}
    call = await desk.reader.parse(operation, json.dumps(said).encode(), tenant())
    assert isinstance(await desk.reader.fingerprint(call, tenant(context_tokens=len(LONG) // 32), None), Fingerprint)
    with pytest.raises(ContextLengthError, match="this tenant may use 9000"):
        await desk.reader.fingerprint(call, tenant(context_tokens=9000), None)
    desk.up(stats=msgspec.structs.replace(STATS, context_length_tokens=9000))
    with pytest.raises(ContextLengthError, match="take less than 9000"):
        await desk.reader.fingerprint(call, tenant(), None)
    desk.up(stats=msgspec.structs.replace(STATS, context_length_tokens=len(LONG)))
    assert isinstance(await desk.reader.fingerprint(call, tenant(), None), Fingerprint)


PARTS = [{"type": "image", "source": {"data": "A" * 1000}}, {"type": "text", "text": LONG}]


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        (Operation.COUNT_TOKENS, {"messages": [{"role": "user", "content": LONG}]}),
        (Operation.COUNT_TOKENS, {"messages": [{"role": "user", "content": PARTS}]}),
        (Operation.COUNT_TOKENS, {"messages": [], "system": [{"type": "text", "text": LONG}]}),
        (Operation.EMBEDDINGS, {"input": ["short", LONG]}),
        (Operation.EMBEDDINGS, {"input": LONG}),
        (Operation.EMBEDDINGS, {"input": [123_456] * 30_000}),
        (Operation.EMBEDDINGS, {"input": [[1], [123_456] * 30_000]}),
        (Operation.MESSAGES, {"messages": [{"role": "user", "content": PARTS}]}),
    ],
)
async def test_so_is_a_text_that_an_engine_would_count_or_embed(
    desk: Desk, operation: Operation, fields: dict[str, Any]
) -> None:
    call = await desk.reader.parse(operation, json.dumps({"model": "m"} | fields).encode(), tenant())
    await desk.reader.fingerprint(call, tenant(), None)
    desk.up(stats=msgspec.structs.replace(STATS, context_length_tokens=9000))
    with pytest.raises(ContextLengthError, match="take less than 9000"):
        await desk.reader.fingerprint(call, tenant(), None)


async def test_the_bytes_of_images_are_no_text_of_a_prompt_that_is_counted(desk: Desk) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": LONG}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    desk.up(stats=msgspec.structs.replace(STATS, context_length_tokens=9000))
    call = await desk.reader.parse(Operation.COUNT_TOKENS, body, tenant())
    await desk.reader.fingerprint(call, tenant(), None)


@pytest.mark.parametrize("messages", [None, 5, "text", [5, None], [{"content": {"text": 5}}], {"role": "user"}])
def test_messages_of_any_form_are_passed_on_to_the_engine_that_counts_them(messages: Any) -> None:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert parse_call(Operation.COUNT_TOKENS, body).body == body


async def test_a_long_body_of_many_objects_is_refused(desk: Desk) -> None:
    many = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{}] * 200_000})
    with pytest.raises(InvalidRequestError, match="more than 100000 objects and fields"):
        await desk.reader.parse(Operation.CHAT, many.encode(), tenant())
