"""From text to token ids exactly as a model's tokenizer does it, without encoding a tenant's earlier text again."""

from kvcontrol.tokenization.encoder import (
    Choice,
    FastokensEncoder,
    HuggingFaceEncoder,
    SlowEncoder,
    TextEncoder,
    choose_encoder,
    disagreement,
)
from kvcontrol.tokenization.pieces import (
    Memoryless,
    MemoryStats,
    PieceMemory,
    RememberingEncoder,
    Sought,
    TenantMemory,
    remembering,
)

__all__ = [
    "Choice",
    "FastokensEncoder",
    "HuggingFaceEncoder",
    "MemoryStats",
    "Memoryless",
    "PieceMemory",
    "RememberingEncoder",
    "SlowEncoder",
    "Sought",
    "TenantMemory",
    "TextEncoder",
    "choose_encoder",
    "disagreement",
    "remembering",
]
