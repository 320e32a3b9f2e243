"""The tenant's salt, from LMDeploy's sequence into the extra identity of every block of it.

LMDeploy's trie matches a block only where tokens *and* extra identity are equal, so two salts never share KV, nor does
a salted request with an unsalted one. The salt is a ``MultimodalSpan`` of length 0: code that reads the identity
finds the type that it expects. ``kvcontrol.core.hashing`` takes the same salt as the key of the root.
"""

from collections.abc import Callable
from typing import Any, Final

from engines.lmdeploy.http.carried import Carried
from engines.requests.salt import SALT

_SPANS = "kvgate_salt_spans"
_MODALITY = "kvgate.cache_salt"


CARRIED_SALT: Final = Carried("kvgate_cache_salt", SALT)


def salt_of_identity(extra_identity: tuple[Any, ...]) -> str:
    """Return the salt inside a trie node's extra identity, "" where there is none."""
    if extra_identity and extra_identity[0].modality == _MODALITY:
        return str(extra_identity[0].content_hash)
    return ""


def salt_of_sequence(seq: Any) -> str:
    """Return the salt that LMDeploy's sequence was sent with, "" where there is none."""
    return CARRIED_SALT.of(seq.sampling_param)


def without_salt(extra_identity: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what else than the salt a block depends on."""
    return extra_identity[1:] if salt_of_identity(extra_identity) else extra_identity


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def block_extra_identity(original: Callable[[Any, int, int], tuple[Any, ...]]) -> Any:
    """``SchedulerSequence.get_prefix_cache_extra_identity``: the salt comes first."""

    def get_prefix_cache_extra_identity(self: Any, start: int, end: int) -> tuple[Any, ...]:
        others = original(self, start, end)
        return _salt_spans(self) + others if others else _salt_spans(self)

    return get_prefix_cache_extra_identity


def request_extra_identity(original: Callable[[Any, int], tuple[Any, ...]]) -> Any:
    """``make_request_multimodal_identity``: what a state checkpoint is verified against, salted likewise."""

    def make_request_multimodal_identity(seq: Any, step: int) -> tuple[Any, ...]:
        return _salt_spans(seq) + original(seq, step)

    return make_request_multimodal_identity


def _salt_spans(seq: Any) -> tuple[Any, ...]:
    """The salt as a span, made once a request: it is asked for with every block, on the engine's thread."""
    salt = salt_of_sequence(seq)
    if not salt:
        return ()
    param = seq.sampling_param
    spans: tuple[Any, ...] = getattr(param, _SPANS, ())
    if not spans or spans[0].content_hash != salt:
        spans = _spans_of(salt)
        setattr(param, _SPANS, spans)
    return spans


def _spans_of(salt: str) -> tuple[Any, ...]:
    from lmdeploy.pytorch.prefix_cache_state import MultimodalSpan

    return (MultimodalSpan(0, 0, _MODALITY, salt),)
