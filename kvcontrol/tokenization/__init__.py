"""From text to token ids exactly as a model's tokenizer does it, without encoding a tenant's earlier text again."""

from kvcontrol.tokenization.cuts import PART_CHARS, Cuts
from kvcontrol.tokenization.encoder import (
    FastokensEncoder,
    HuggingFaceEncoder,
    SlowEncoder,
    TextEncoder,
    choose_encoder,
    disagreement,
)
from kvcontrol.tokenization.lengths import MOST_CHARS_PER_TOKEN, least_tokens
from kvcontrol.tokenization.pieces import (
    ManyPiecesError,
    Memoryless,
    PieceMemory,
    RememberingEncoder,
    Sought,
    remembering,
)

__all__ = [
    "MOST_CHARS_PER_TOKEN",
    "PART_CHARS",
    "Cuts",
    "FastokensEncoder",
    "HuggingFaceEncoder",
    "ManyPiecesError",
    "Memoryless",
    "PieceMemory",
    "RememberingEncoder",
    "SlowEncoder",
    "Sought",
    "TextEncoder",
    "choose_encoder",
    "disagreement",
    "least_tokens",
    "remembering",
]
