"""Two models of one shape with other weights, and what engines answer with each."""

from pathlib import Path

from tests.support.tiered_engine import PROMPTS, TieredEngine

OURS, OTHERS, UNKNOWN = "ours", "others", "unknown"
"""The model that an engine starts with, the one that it may get, and weights that are of neither."""


def two_models(ours: Path, folder: Path) -> dict[str, Path]:
    """Return both models' folders by name; the other one is built at ``folder``."""
    from engines.models.tiny import build_tiny

    return {OURS: ours, OTHERS: build_tiny(folder, seed=1)}


def undisturbed_answers(models: dict[str, Path], new_tokens: int) -> dict[str, list[list[int]]]:
    """Return the answers to ``PROMPTS`` of engines that nothing disturbs and that have no hooks of ours."""
    found = {}
    for name, folder in models.items():
        with TieredEngine.start(folder, num_gpu_blocks=256) as plain:
            found[name] = [plain.run(prompt, new_tokens=new_tokens)[0] for prompt in PROMPTS]
    return found
