"""Values that can't be are refused where they are made or enter a graph, with ``IRError`` that names part and limit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    DecodeConfig,
    Device,
    DeviceLimits,
    EvictConfig,
    Handover,
    IRBuilder,
    IRError,
    IRGraph,
    IRNode,
    IRRequest,
    LoadConfig,
    NodeType,
    PassContext,
    PhaseLimits,
    PinConfig,
    Placement,
    PrefillConfig,
    SharedPrefix,
    ThresholdSeparator,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.strategies import EngineView, WaitingId, WaitingRequest, make_strategy
from lab.research.ir.reader import parse
from lab.research.ir.timeline import Paces

A, B = Device("a"), Device("b")
NAN, INF = float("nan"), float("inf")
GOOD = IRNode(
    node_type=NodeType.PREFILL,
    inputs=(),
    outputs=(ValueName("kv"),),
    config=PrefillConfig(request="r", start=0, end=8),
    device=A,
)


def request(**said: Any) -> IRRequest:
    return IRRequest(
        **({"request_id": "r", "prompt_tokens": 8, "max_tokens": 4, "placement": Placement(answer=A)} | said)
    )


def test_what_can_be_is_taken() -> None:
    IRGraph([GOOD], GOOD.outputs)
    request(deadline_s=-3.0, reuse_s=0, priority=-1, cached=(CachedRun(device=A, tier=CacheTier.HBM, end=8),))
    assert Placement(answer=A, handover=Handover(prefill=B, transport=KVTransport.TIERS)).prefill == B


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"request_id": ""}, "request_id must be"),
        ({"request_id": None}, "request_id must be"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0, max_tokens 4; both must be 64-bit integers > 0"),
        ({"prompt_tokens": NAN}, "prompt_tokens is nan"),
        ({"prompt_tokens": None}, "prompt_tokens is None"),
        ({"prompt_tokens": 10**5000}, "prompt_tokens is a huge int, max_tokens 4; both must be 64-bit integers"),
        ({"max_tokens": 1 << 63}, "max_tokens 9223372036854775808; both must be 64-bit integers"),
        ({"max_tokens": 1.5}, "max_tokens 1.5"),
        ({"placement": None}, "placement is None"),
        ({"priority": NAN}, "priority is nan; it must be a 64-bit integer"),
        *[({"deadline_s": bad}, f"deadline_s is {bad}; it must be a finite") for bad in (NAN, INF, -INF)],
        ({"deadline_s": "soon"}, "deadline_s is 'soon'"),
        *[({"reuse_s": bad}, f"reuse_s is {bad}; it must be a finite") for bad in (NAN, INF, -5)],
        (
            {"cached": (CachedRun(device=A, tier=CacheTier.HBM, end=9),)},
            "ends at 9; it must be a 64-bit integer > 0 and <= 8",
        ),
        ({"cached": (CachedRun(device=A, tier=CacheTier.HBM, end=None),)}, "ends at None"),  # type: ignore[arg-type]
        ({"shared": (SharedPrefix(key=b"x", end=-1),)}, "as they rise within the prompt"),
        ({"shared": (SharedPrefix(key=b"x", end=None),)}, "must be a 64-bit integer > 0"),  # type: ignore[arg-type]
    ],
)
def test_a_request_that_cannot_be_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(IRError, match=message):
        request(**said)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[
            (
                lambda name=name, bad=bad: DeviceLimits(**{name: bad}),
                f"{name} is {bad}; it must be a 64-bit integer >= 0",
            )
            for name in ("capacity_tokens", "prefill_batch_tokens", "prefill_batch_requests", "decode_batch_requests")
            for bad in (-1, NAN, None)
        ],
        (lambda: DeviceLimits(spill=CacheTier.HBM), "must be a tier below HBM"),
        (lambda: PhaseLimits(requests=-1), "requests is -1"),
        (lambda: PhaseLimits(tokens=-1), "tokens is -1"),
        (lambda: ThresholdSeparator(min_uncached_tokens=-1), "min_uncached_tokens is -1"),
        *[(lambda bad=bad: PassContext(requests={}, keep_for_s=bad), "keep_for_s is") for bad in (-1, NAN, INF, None)],
        *[(lambda bad=bad: Paces(load_s=bad), "load_s is") for bad in (-1, NAN, INF, None)],
        (
            lambda: Placement(answer=A, handover=Handover(prefill=A, transport=KVTransport.MIGRATION)),
            "handed over from a to a",
        ),
    ],
)
def test_limits_and_places_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(IRError, match=message):
        make()


@pytest.mark.parametrize("said", [{"step_s": NAN}, {"prefill_tokens_per_s": INF}, {"running": -1}])
def test_a_view_of_an_engine_that_cannot_be_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        EngineView(**said)


def test_a_request_with_less_than_no_tokens_does_not_wait() -> None:
    queue = make_strategy("priority")
    with pytest.raises(ValueError, match="less than no tokens"):
        queue.add(WaitingRequest(request_id=WaitingId("r"), arrived_s=0.0, prefill_tokens=-1))
    assert not queue


@pytest.mark.parametrize(
    ("nodes", "results", "message"),
    [
        (None, (), "nodes: None is no sequence"),
        ([None], (), "nodes: None is no IRNode"),
        ([GOOD], None, "results: None is no sequence"),
        ([GOOD], [["kv"]], r"results: \['kv'\] is no str"),
    ],
)
def test_a_graph_of_other_things_is_refused(nodes: Any, results: Any, message: str) -> None:
    with pytest.raises(IRError, match=message):
        IRGraph(nodes, results)


def test_a_node_that_moves_kv_to_where_it_is_is_refused() -> None:
    config = TransferConfig(request="r", start=0, end=8, target=A)
    node = replace(GOOD, node_type=NodeType.TRANSFER, inputs=("x",), config=config)
    with pytest.raises(IRError, match="transfer %kv: it moves KV from a to a, where it is already"):
        IRGraph([node], GOOD.outputs)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"node_type": "compute"}, "a node of type 'compute': unknown type; allowed: load, prefill"),
        ({"node_type": None}, "a node of type None"),
        ({"node_type": []}, r"a node of type \[\]"),
        ({"inputs": None}, "its inputs are None; they must be a tuple of names"),
        ({"inputs": (None,)}, "its inputs hold None, which is no name"),
        ({"outputs": ["kv"]}, r"its outputs are \['kv'\]"),
        ({"outputs": ([],)}, r"its outputs hold \[\]"),
        ({"config": None}, "its config is a NoneType; it must be a PrefillConfig"),
        ({"device": None}, "its device is empty"),
        ({"device": 3}, "its device is 3"),
        ({"config": PrefillConfig(request=None, start=0, end=8)}, "its request is empty"),  # type: ignore[arg-type]
        ({"config": PrefillConfig(request=[1], start=0, end=8)}, "its request is"),  # type: ignore[arg-type]
        ({"config": PrefillConfig(request="r", start=None, end=8)}, r"tokens \[None, 8\)"),  # type: ignore[arg-type]
        ({"config": PrefillConfig(request="r", start=0, end="8")}, r"tokens \[0, '8'\)"),  # type: ignore[arg-type]
        ({"config": PrefillConfig(request="r", start=0, end=1.5)}, r"tokens \[0, 1.5\)"),  # type: ignore[arg-type]
        ({"config": PrefillConfig(request="r", start=0, end=8, batch=-1)}, "batch is -1"),
    ],
)
def test_a_node_of_other_things_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(IRError, match=message):
        IRGraph([replace(GOOD, **said)], GOOD.outputs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoadConfig(request="r", start=0, end=8, tier=None), "tier is None; it must be one of HBM"),  # type: ignore[arg-type]
        (TransferConfig(request="r", start=0, end=8, target=Device("")), "target is ''"),
        (TransferConfig(request="r", start=0, end=8, target=None), "target is None"),  # type: ignore[arg-type]
        (TransferConfig(request="r", start=0, end=8, target=B, transport="x"), "transport is 'x'"),  # type: ignore[arg-type]
        (DecodeConfig(request="r", start=None, max_tokens=1), "start is None"),  # type: ignore[arg-type]
        (DecodeConfig(request="r", start=1, max_tokens=NAN), "max_tokens nan"),  # type: ignore[arg-type]
        (DecodeConfig(request="r", start=1, max_tokens=1, batch="x"), "batch is 'x'"),  # type: ignore[arg-type]
        *[(PinConfig(request="r", ttl_s=bad), "ttl_s is") for bad in (NAN, INF, 0, None)],  # type: ignore[arg-type]
        (EvictConfig(request="r", keep="DISK"), "keep is 'DISK'; it must be one of"),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_that_cannot_be_says_so(config: Any, message: str) -> None:
    assert message in config.problem()


HUGE = 10**400
LONG = tuple(range(10_000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[
            (lambda field=field, bad=bad: request(**{field: bad}), f"{field} (is|holds) .*must be a tuple of")
            for field in ("cached", "shared")
            for bad in (5, "x", (1,), None, 0, {}, LONG)
        ],
        *[(lambda bad=bad: request(prompt_tokens=bad), "integers > 0") for bad in (True, "x" * 10_000, LONG)],
        *[(lambda bad=bad: request(reuse_s=bad), "reuse_s is .* finite") for bad in (HUGE, 10**5000, True)],
        (lambda: request(deadline_s=HUGE), "deadline_s is .* finite"),
        (
            lambda: request(cached=(CachedRun(device=None, tier=CacheTier.HBM, end=8),)),
            "device of a cached run is None",
        ),
        (lambda: request(cached=(CachedRun(device=A, tier="x", end=8),)), "tier of a cached run is 'x'.* HBM"),
        (lambda: request(shared=(SharedPrefix(key=[1], end=8),)), "key of a shared prefix is .1.; it must be bytes"),
        (
            lambda: request(shared=(SharedPrefix(key=b"k", end=9),)),
            "ends at 9; it must be a 64-bit integer > 0 and <= 8",
        ),
        *[(lambda bad=bad: Placement(answer=bad), "answer is .* name of a device") for bad in (NAN, None, "", LONG)],
        (lambda: Placement(answer=A, handover="x"), "handover is 'x'; it must be a Handover, or None"),
        (lambda: Placement(answer=A, handover=Handover(prefill=1, transport=KVTransport.TIERS)), "prefill is 1;"),
        (lambda: Placement(answer=A, handover=Handover(prefill=B, transport="x")), "transport is 'x'; .* tiers"),
        *[(lambda bad=bad: IRBuilder().build(bad), "requests: .* is no") for bad in (5, [1], "x", LONG)],
        *[(lambda bad=bad: parse(bad), "it must be a text") for bad in (None, 5, b"x", LONG)],
        (lambda: parse("x" * 10_000), "line 1: .* is no node"),
        (lambda: PassContext(requests=None), "requests are None; they must be a mapping"),
        (lambda: IRGraph([GOOD], ("x" * 10_000,)), "results: %x"),
    ],
)
def test_what_is_of_another_type_is_refused_in_a_short_message(make: Callable[[], object], message: str) -> None:
    with pytest.raises(IRError, match=message) as caught:
        make()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", [NAN, None, [1], LONG])
def test_a_reason_that_is_no_text_is_refused(bad: Any) -> None:
    assert "it must be a text" in EvictConfig(request="r", reason=bad).problem()
