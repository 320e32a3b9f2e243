"""The digest of a folder of weights: a model's, or an adapter's.

Two processes on two machines compute the same digest for the same files: names and contents count, never the place.
All contents count, since a fine-tune may change a few numbers of a few tensors, and an adapter is exchanged under its
old name.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from engines.lmdeploy.file_digests import DIGEST_BYTES, FileDigests

_CONFIG_FILES = (
    "config.json",
    "adapter_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
)


class WeightsError(RuntimeError):
    """A folder of weights can't be digested; the message names the file and why."""


def weights_revision(folder: Path, digests: FileDigests) -> str:
    """Return a hex digest of a Hugging Face folder of weights.

    LMDeploy prefers safetensors of a model and pickles of an adapter: both count. Milliseconds for files that
    ``digests`` knows. Raises ``WeightsError`` for a folder without weights,
    an unreadable file, or one that is being written.
    """
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"kvgate.weights")
    try:
        for name in _CONFIG_FILES:
            path = folder / name
            if path.is_file():
                field(digest, name, path.read_bytes())
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        if not weights:
            raise WeightsError(f"{folder} holds neither *.safetensors nor *.bin files")
        for path in weights:
            field(digest, path.name, digests.of(path))
    except OSError as error:
        raise WeightsError(f"can't read the weights in {folder}: {error}") from error
    return digest.hexdigest()


def field(digest: Any, tag: str, data: bytes) -> None:
    """Add data to a digest, so that no data can imitate another field."""
    digest.update(f"{len(tag)}:{tag}:{len(data)}:".encode())
    digest.update(data)
