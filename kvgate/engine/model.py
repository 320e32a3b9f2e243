"""Which model to serve: the embedded SmolLM2, the tiny random one, or a Hugging Face folder of the user's."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvgate.boards import PrepareBoard
from kvgate.display import output
from kvgate.failure import CommandError

_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model folder and the name that clients say. ``talks_sense`` is False for random weights."""

    folder: Path
    name: str
    talks_sense: bool = True
    is_tiny: bool = False


def model_from_folder(folder: Path, name: str | None) -> Model:
    """Return the model in a folder; raises ``CommandError`` that says what a model folder lacks."""
    if not folder.is_dir():
        raise CommandError(
            f"--model {folder}: no such folder",
            "pass a Hugging Face model folder (config, weights, tokenizer); hf download REPO --local-dir creates one",
        )
    missing = []
    if not _is_model_config(folder / "config.json"):
        missing.append("config.json with a model_type")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        missing.append("weights (*.safetensors or *.bin)")
    if not any((folder / file).is_file() for file in _TOKENIZERS):
        missing.append("a tokenizer (tokenizer.json or tokenizer.model)")
    if missing:
        raise CommandError(
            f"--model {folder} is not a Hugging Face model folder; it lacks {', '.join(missing)}",
            "pass the folder with these files",
        )
    return Model(folder=folder.resolve(), name=name or folder.resolve().name)


def tiny_model(name: str | None = None, *, console: Console = output) -> Model:
    """Return the tiny random Llama, made on first use; raises ``CommandError`` when it can't be written."""
    from engines.models import tiny
    from engines.models.cache import CacheError, cache_dir, cached

    def build(folder: Path) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # one file of 0.6 MB
        tiny.write_tiny(folder)

    try:
        with PrepareBoard(console) as board:
            folder = cached(
                cache_dir() / tiny.NAME, build, recipe=tiny.RECIPE, needed_bytes=tiny.NEEDED_BYTES, progress=board
            )
    except CacheError as error:
        raise CommandError(error.message, error.advice) from error
    return Model(folder=folder, name=name or tiny.NAME, talks_sense=False, is_tiny=True)


def embedded_model(name: str | None = None, *, console: Console = output) -> Model:
    """Return SmolLM2-135M-Instruct, fetched and converted on first use. Raises ``CommandError``."""
    from engines.models import smollm2
    from engines.models.cache import CacheError, cache_dir

    try:
        with PrepareBoard(console) as board:
            folder = smollm2.prepare(cache_dir(), board)
    except CacheError as error:
        raise CommandError(error.message, error.advice) from error
    return Model(folder=folder, name=name or smollm2.NAME)


def _is_model_config(config: Path) -> bool:
    try:
        read = json.loads(config.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(read, dict) and "model_type" in read
