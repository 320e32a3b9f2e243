"""Requests as graphs of steps: what is computed, moved and answered where, and in which order."""

from kvcontrol.scheduler_ir.builder import IRBuilder
from kvcontrol.scheduler_ir.executor import ExecutorAPI, PlanState, PlanStatus, StepExecutor, StepRunner
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    Device,
    EvictConfig,
    IRError,
    IRNode,
    JoinConfig,
    LoadConfig,
    NodeConfig,
    NodeType,
    PinConfig,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import (
    DeviceLimits,
    IROptimizer,
    IRPass,
    Optimized,
    PassContext,
    PassReport,
    Rewritten,
)
from kvcontrol.scheduler_ir.passes import PrefixCacheAwarePass
from kvcontrol.scheduler_ir.pd_separation import (
    HybridOnly,
    PDSeparator,
    PhaseLimits,
    Side,
    Split,
    SplitReason,
    ThresholdSeparator,
)
from kvcontrol.scheduler_ir.plan import ExecutionPlan, Leg, LegKind, PlanId, legs_of
from kvcontrol.scheduler_ir.request import CachedRun, Handover, IRRequest, Placement, SharedPrefix
from kvcontrol.scheduler_ir.text import parse, render

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
    "NodeConfig",
    "NodeType",
    "Optimized",
    "PDSeparator",
    "PassContext",
    "PassReport",
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
    "StepExecutor",
    "StepRunner",
    "ThresholdSeparator",
    "TransferConfig",
    "ValueName",
    "legs_of",
    "parse",
    "render",
]
