"""The calls that serve a request: the table that a gateway walks.

    plan        leg       instance  steps
    hybrid      ANSWER    answer    load (where it holds some of the prompt), prefill, decode
    separated   PREFILL   prefill   load (where it holds some of the prompt), prefill
                HANDOVER  prefill   transfer, evict
                ANSWER    answer    load (where it holds some of the prompt), decode

``IRGraph`` draws the same plan for ``/explain``: a test holds the legs of its graph to this table.
"""

from typing import Final

from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import Device, Leg, LegKind, NodeType

Legs = tuple[Leg, ...]

_HAND_OVER: Final = (NodeType.TRANSFER, NodeType.EVICT)


def hybrid_legs(answer: Device, *, holds: bool) -> Legs:
    """Return the leg of a plan that one instance carries out; ``holds``: it has some of the prompt in its cache."""
    return (Leg(kind=LegKind.ANSWER, device=answer, steps=_after_load(NodeType.PREFILL, NodeType.DECODE, holds=holds)),)


def separated_legs(
    answer: Device, prefill: Device, transport: KVTransport, *, answer_holds: bool, prefill_holds: bool
) -> Legs:
    """Return the legs of a plan in which ``prefill`` computes the prompt and ``answer`` takes its KV over."""
    return (
        Leg(
            kind=LegKind.PREFILL,
            device=prefill,
            steps=_after_load(NodeType.PREFILL, holds=prefill_holds),
            transport=transport,
        ),
        Leg(kind=LegKind.HANDOVER, device=prefill, steps=_HAND_OVER, target=answer, transport=transport),
        Leg(kind=LegKind.ANSWER, device=answer, steps=_after_load(NodeType.DECODE, holds=answer_holds)),
    )


def _after_load(*steps: NodeType, holds: bool) -> tuple[NodeType, ...]:
    return (NodeType.LOAD, *steps) if holds else steps
