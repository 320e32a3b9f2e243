"""What an engine's KV blocks depend on, read from the running engine: the root of its block hashes.

Equal tokens have equal KV where the weights, all of them, and the effective configuration are equal. Two processes on
two machines compute the same identity, so that a gateway finds the blocks of both, and peers may exchange them.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from engines.lmdeploy.effective_config import effective_config
from engines.lmdeploy.file_digests import DIGEST_BYTES, FileDigests
from engines.lmdeploy.weights import WeightsError, field, weights_revision
from kvcontrol.core.blocks import CacheIdentity

LAYOUT_VERSION = 1
"""Grows when our own code (the CPU's attention, the formats of quantised KV) stores other bytes for the same tokens."""


def identity_of(engine: Any, *, model: str, digests: FileDigests) -> CacheIdentity:
    """Return the identity of the blocks of an LMDeploy ``Engine``.

    Raises ``WeightsError`` or ``IdentityError``. Within a second for weights that ``digests`` knows.
    """
    cache = engine.cache_config
    return CacheIdentity(
        model=model,
        revision=_revision(engine, digests),
        kv_dtype=_kv_dtype(engine),
        block_size_tokens=int(cache.block_size),
        tp_size=int(engine.dist_config.attn_tp),
        adapters=tuple((name, weights_revision(folder, digests)) for name, folder in sorted(_adapters(engine).items())),
    )


def _adapters(engine: Any) -> dict[str, Path]:
    """Return the folders that the engine has loaded its adapters from: a path, or where the hub's copy lies."""
    from lmdeploy.utils import get_model

    config = engine.engine_config
    return {
        name: Path(place if Path(place).exists() else get_model(place, config.download_dir, config.revision))
        for name, place in (config.adapters or {}).items()
    }


def _revision(engine: Any, digests: FileDigests) -> str:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"kvgate.model")
    field(digest, "layout", str(LAYOUT_VERSION).encode())
    field(digest, "weights", weights_revision(Path(engine.model_path), digests).encode())
    for other in _other_models(engine):
        field(digest, "other", weights_revision(Path(other), digests).encode())
    try:
        field(digest, "config", effective_config(engine).encode())
    except OSError as error:
        raise WeightsError(f"can't read the custom module map: {error}") from error
    return digest.hexdigest()


def _other_models(engine: Any) -> list[str]:
    """Return the folders of models that run beside the main one, whose KV lies in the same blocks."""
    speculative = getattr(engine, "specdecode_config", None)
    memory = getattr(getattr(engine, "misc_config", None), "memdecode_config", None)
    folders = [
        None if speculative is None else speculative.model,
        None if memory is None else memory.memory_model_path,
    ]
    return [folder for folder in folders if folder]


def _kv_dtype(engine: Any) -> str:
    """``float32``, or with quantisation ``int8-float16``: the codes, and the type that they were computed in."""
    computed = str(engine.model_config.dtype).removeprefix("torch.")
    policy = engine.cache_config.quant_policy
    return computed if int(policy) == 0 else f"{policy.name.lower()}-{computed}"
