"""Options that benchmarks have in common, and how they say how far they are."""

from typing import Annotated

import typer

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.display import errors

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
KVQuant = Annotated[KVQuantisation, typer.Option(help="How engines store KV.")]


def say(step: str) -> None:
    """Print a step to standard error, where it doesn't mix with a report."""
    errors.print(f"  {step}", markup=False, soft_wrap=True)
