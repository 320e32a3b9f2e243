"""Whether an engine's next step computes prompts or tokens: paces behind one pure function, swapped between steps."""

from kvcontrol.scheduler_ir.pacing.cost import LearntCost, StepCosts
from kvcontrol.scheduler_ir.pacing.overtaking import MUCH_FEWER, LongPrompt, WaitingPrompt, overtaker
from kvcontrol.scheduler_ir.pacing.pace import (
    MOST_OWED,
    ActiveChunk,
    ChunkBounds,
    Pace,
    Reason,
    StepCommand,
    StepView,
    decide,
    limits,
    owed,
)
from kvcontrol.scheduler_ir.pacing.registry import (
    ALTERNATE,
    DEFAULT_TARGET_MS,
    ENGINE_PACE,
    ITL_TARGET,
    PACES,
    make_pace,
)

__all__ = [
    "ALTERNATE",
    "DEFAULT_TARGET_MS",
    "ENGINE_PACE",
    "ITL_TARGET",
    "MOST_OWED",
    "MUCH_FEWER",
    "PACES",
    "ActiveChunk",
    "ChunkBounds",
    "LearntCost",
    "LongPrompt",
    "Pace",
    "Reason",
    "StepCommand",
    "StepCosts",
    "StepView",
    "WaitingPrompt",
    "decide",
    "limits",
    "make_pace",
    "overtaker",
    "owed",
]
