"""What an engine's KV blocks depend on, read from the running engine: the root of its block hashes.

The weights' revision is a digest that two processes on two machines compute alike, without reading gigabytes: the
configuration files whole, every tensor's name, type, shape and place, and a sample out of the middle of every tensor.
A fine-tune of the same architecture changes nearly every tensor, so it changes the samples; what is not found is a
checkpoint that was edited by hand in a few numbers, which is not a threat here: the digest separates models, it doesn't
authenticate them.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from kvcontrol.core.blocks import CacheIdentity

_CONFIG_FILES = ("config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json")
_SAMPLE_BYTES = 64
_OPAQUE_SAMPLES = 64
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20
_DIGEST_BYTES = 16


class WeightsError(RuntimeError):
    """A model folder can't be digested; the message names the file and why."""


def identity_of(engine: Any, *, model: str) -> CacheIdentity:
    """Return the identity of the blocks of an LMDeploy ``Engine``; raises ``WeightsError``."""
    cache = engine.cache_config
    return CacheIdentity(
        model=model,
        revision=weights_revision(Path(engine.model_path)),
        kv_dtype=_kv_dtype(engine),
        block_size_tokens=int(cache.block_size),
        tp_size=int(engine.dist_config.attn_tp),
    )


def weights_revision(folder: Path) -> str:
    """Return a hex digest of a Hugging Face model folder; milliseconds for 1 GB, about a second for 200 files.

    Deterministic across processes and machines: only names, contents and sizes count. Raises ``WeightsError`` for a
    folder without weights or an unreadable file.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"kvgate.weights")
    try:
        for name in _CONFIG_FILES:
            path = folder / name
            if path.is_file():
                _field(digest, name, path.read_bytes())
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        if not weights:
            raise WeightsError(f"{folder} holds neither *.safetensors nor *.bin files")
        for path in weights:
            with path.open("rb") as file:
                _weights_file(digest, path, file)
    except OSError as error:
        raise WeightsError(f"can't read the weights in {folder}: {error}") from error
    return digest.hexdigest()


def _weights_file(digest: Any, path: Path, file: BinaryIO) -> None:
    size = path.stat().st_size
    _field(digest, "file", f"{path.name}:{size}".encode())
    if path.suffix == ".safetensors":
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise WeightsError(f"{path} is no safetensors file: it announces a header of {length} bytes")
        header = file.read(length)
        _field(digest, "header", header)
        base = _HEADER_LENGTH_BYTES + length
        middles = sorted(base + (begin + end) // 2 for begin, end in _tensor_ranges(header, path))
    else:
        middles = [size * i // _OPAQUE_SAMPLES for i in range(_OPAQUE_SAMPLES)]
    for offset in middles:
        file.seek(offset)
        _field(digest, "sample", file.read(_SAMPLE_BYTES))


def _tensor_ranges(header: bytes, path: Path) -> list[tuple[int, int]]:
    try:
        entries = json.loads(header)
        return [
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise WeightsError(f"{path} has a header that is not safetensors': {error!r}") from error


def _field(digest: Any, tag: str, data: bytes) -> None:
    digest.update(f"{tag}:{len(data)}:".encode())
    digest.update(data)


def _kv_dtype(engine: Any) -> str:
    """``float32``, or with quantisation ``int8-float16``: the codes, and the type that they were computed in."""
    computed = str(engine.model_config.dtype).removeprefix("torch.")
    policy = engine.cache_config.quant_policy
    return computed if int(policy) == 0 else f"{policy.name.lower()}-{computed}"


__all__ = ["WeightsError", "identity_of", "weights_revision"]
