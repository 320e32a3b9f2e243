"""Requests as graphs of steps: what is computed, moved and answered where, and in which order."""

from kvcontrol.scheduler_ir.builder import IRBuilder
from kvcontrol.scheduler_ir.executor import ExecutorAPI, PlanState, PlanStatus
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    Device,
    EvictConfig,
    IRError,
    IRNode,
    JoinConfig,
    LoadConfig,
    NodeType,
    PinConfig,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import DeviceLimits, IROptimizer, IRPass, PassContext, Rewritten
from kvcontrol.scheduler_ir.pd_separation import (
    HybridOnly,
    PDSeparator,
    PhaseLimits,
    Side,
    Split,
    SplitReason,
    ThresholdSeparator,
)
from kvcontrol.scheduler_ir.plan import ExecutionPlan, Leg, LegKind, PlanId
from kvcontrol.scheduler_ir.prefix_cache import PrefixCacheAwarePass
from kvcontrol.scheduler_ir.request import CachedRun, Handover, IRRequest, Placement, SharedPrefix
from kvcontrol.scheduler_ir.text import render

__all__ = [
    "CachedRun",
    "DecodeConfig",
    "Device",
    "DeviceLimits",
    "EvictConfig",
    "ExecutionPlan",
    "ExecutorAPI",
    "Handover",
    "HybridOnly",
    "IRBuilder",
    "IRError",
    "IRGraph",
    "IRNode",
    "IROptimizer",
    "IRPass",
    "IRRequest",
    "JoinConfig",
    "Leg",
    "LegKind",
    "LoadConfig",
    "NodeType",
    "PDSeparator",
    "PassContext",
    "PhaseLimits",
    "PinConfig",
    "Placement",
    "PlanId",
    "PlanState",
    "PlanStatus",
    "PrefillConfig",
    "PrefixCacheAwarePass",
    "Rewritten",
    "SharedPrefix",
    "Side",
    "Split",
    "SplitReason",
    "ThresholdSeparator",
    "TransferConfig",
    "ValueName",
    "render",
]
