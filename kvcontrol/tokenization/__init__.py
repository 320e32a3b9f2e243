"""From text to token ids exactly as a model's tokenizer does it, without encoding a tenant's earlier text again."""

from kvcontrol.tokenization.cuts import PART_CHARS, Cuts
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
    ManyPiecesError,
    Memoryless,
    MemoryStats,
    PieceMemory,
    RememberingEncoder,
    Sought,
    TenantMemory,
    remembering,
)

__all__ = [
    "PART_CHARS",
    "Choice",
    "Cuts",
    "FastokensEncoder",
    "HuggingFaceEncoder",
    "ManyPiecesError",
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
