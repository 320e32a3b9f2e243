"""From a request's text to the hashes of its KV blocks."""

from gateway.fingerprint.canonical import ChatPrompt, Prompt, TokenPrompt, Unreadable, canonical_chat
from gateway.fingerprint.fingerprint import Fingerprint, Fingerprinter, Gap
from gateway.fingerprint.tokenizer import ModelTokenizer, load_tokenizer

__all__ = [
    "ChatPrompt",
    "Fingerprint",
    "Fingerprinter",
    "Gap",
    "ModelTokenizer",
    "Prompt",
    "TokenPrompt",
    "Unreadable",
    "canonical_chat",
    "load_tokenizer",
]
