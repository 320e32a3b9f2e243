"""Small random requests, fleets and limits for graphs, as hypothesis strategies."""

from collections.abc import Sequence

from hypothesis import strategies as st

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    Device,
    DeviceLimits,
    Handover,
    IRRequest,
    PassContext,
    Placement,
    SharedPrefix,
)

ANSWERING = (Device("h0"), Device("h1"))
PREFILLING = (Device("p0"), Device("p1"))
_FAMILIES = {b"a": (3, 6, 11), b"b": (1, 8), b"c": (5,)}
_TIERS = (CacheTier.HBM, CacheTier.DDR, CacheTier.NVME)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    answer = draw(st.sampled_from(ANSWERING))
    prefill = draw(st.sampled_from((None, *PREFILLING, *ANSWERING)))
    if prefill is None or prefill == answer:
        return Placement(answer=answer)
    transport = draw(st.sampled_from(KVTransport))
    return Placement(answer=answer, handover=Handover(prefill=prefill, transport=transport))


@st.composite
def requests(draw: st.DrawFn, request_id: str, *, beside: Placement | None = None) -> IRRequest:
    """One that goes ``beside`` others begins like them, and nothing of it is cached."""
    sharing = beside is not None
    tokens = draw(st.integers(4 if sharing else 1, 14))
    placement = draw(placements()) if beside is None else beside
    family = b"a" if sharing else draw(st.sampled_from((None, *_FAMILIES)))
    shared: tuple[SharedPrefix, ...] = ()
    if family is not None:
        ends = [end for end in _FAMILIES[family] if end <= tokens]
        shared = tuple(SharedPrefix(key=family + str(end).encode(), end=end) for end in ends)
    cached: list[CachedRun] = []
    for device in {} if sharing else {placement.answer: None, placement.prefill: None}:
        ends = sorted(draw(st.sets(st.integers(1, tokens), max_size=3)))
        cached += [CachedRun(device=device, tier=draw(st.sampled_from(_TIERS)), end=end) for end in ends]
    return IRRequest(
        request_id=request_id,
        prompt_tokens=tokens,
        max_tokens=draw(st.integers(1, 4)),
        placement=placement,
        priority=draw(st.integers(-1, 1)),
        deadline_s=draw(st.none() | st.integers(0, 3).map(float)),
        cached=tuple(cached),
        shared=shared,
        reuse_s=draw(st.none() | st.sampled_from((1.0, 1000.0))),
    )


@st.composite
def several(draw: st.DrawFn, most: int = 5, *, sharing: bool = False) -> list[IRRequest]:
    """With ``sharing``, all begin alike, go the same way, and nothing is cached."""
    count = draw(st.integers(1, most))
    beside = draw(placements()) if sharing else None
    return [draw(requests(f"r{number}", beside=beside)) for number in range(count)]


@st.composite
def contexts(draw: st.DrawFn, asked: Sequence[IRRequest], *, capacity: bool = False) -> PassContext:
    """Limits under which every request alone can be served."""
    least = max(each.prompt_tokens + each.max_tokens for each in asked)
    limits = {}
    for device in (*ANSWERING, *PREFILLING):
        limits[device] = DeviceLimits(
            capacity_tokens=draw(st.sampled_from((0, least, least + 3, least + 12))) if capacity else 0,
            prefill_batch_tokens=draw(st.sampled_from((0, 2, 5, 9))),
            prefill_batch_requests=draw(st.sampled_from((0, 1, 2))),
            decode_batch_requests=draw(st.sampled_from((0, 1, 2))),
            spill=draw(st.sampled_from((None, CacheTier.DDR))),
        )
    return PassContext(requests={each.request_id: each for each in asked}, devices=limits)
