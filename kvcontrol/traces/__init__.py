"""Text that stands for the blocks of a trace, exact to the token, and the usage that an answer reports."""

from kvcontrol.traces.synthesis import (
    OPENER,
    Ask,
    BlockTexts,
    SynthesisError,
    TextMaker,
    TokenCount,
    Words,
    learn_words,
)
from kvcontrol.traces.usage import UsageError, header_tokens, used

__all__ = [
    "OPENER",
    "Ask",
    "BlockTexts",
    "SynthesisError",
    "TextMaker",
    "TokenCount",
    "UsageError",
    "Words",
    "header_tokens",
    "learn_words",
    "used",
]
