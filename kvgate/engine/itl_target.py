"""The option of ``kvgate engine`` and ``kvgate up`` that bounds what prompts cost running answers."""

from typing import Annotated, TypeAlias

import typer

from kvgate.failure import CommandError

MOST_MS = 60_000
ItlTargetOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=MOST_MS,
        rich_help_panel="Engines",
        help="Target of the inter-token latency beside prefills, in milliseconds; 0: no target. "
        "Default: the preset's, else 55 on GPU, none on CPU.",
    ),
]


def need_possible_target(target_ms: float | None) -> None:
    """Raise ``CommandError`` for a target that no engine takes."""
    if target_ms is not None and 0 < target_ms < 1:
        raise CommandError(f"--itl-target is {target_ms:g} ms", "it must be 1 or more; 0 is no target")
