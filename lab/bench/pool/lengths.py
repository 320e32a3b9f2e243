"""How long real requests are: prompts and answers of three public traces, in tokens, in order of arrival."""

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Length(NamedTuple):
    """A request: tokens of its prompt, and of its answer (at least 1 each)."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace's lengths, under the name that metrics carry."""

    name: str
    requests: tuple[Length, ...]

    def endless(self) -> Iterator[Length]:
        """Yield the requests again and again."""
        while True:
            yield from self.requests


def azure(path: Path) -> Iterator[Length]:
    """Yield the lengths of Azure's trace, in CSV."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield Length(int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def mooncake(path: Path) -> Iterator[Length]:
    """Yield the lengths of one of Mooncake's traces."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            yield Length(said["input_length"], said["output_length"])


def agentic(path: Path) -> Iterator[Length]:
    """Yield the lengths of the trace of coding agents."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            yield Length(said["in"], said["out"])


TRACES: dict[str, tuple[str, Callable[[Path], Iterator[Length]]]] = {
    "azure": ("azure/AzureLLMInferenceTrace_conv.csv.gz", azure),
    "mooncake": ("mooncake/conversation_trace.jsonl.gz", mooncake),
    "agentic": ("agentic/agentic_dev.jsonl.gz", agentic),
}


def load(folder: Path) -> list[Workload]:
    """Read all three traces; ``OSError`` names one that isn't there."""
    return [
        Workload(name=name, requests=tuple(length for length in read(folder / file) if min(length) > 0))
        for name, (file, read) in TRACES.items()
    ]


def drawn(*, requests: int = 5_000, seed: int = 0) -> Workload:
    """Lengths for a machine without the traces: log-normal, medians 2,000 and 200 tokens, a hundredth beyond 32,000 and
    1,300. They stand for no real service, and the metrics say so by the name ``lognormal``.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return Workload(
        name="lognormal",
        requests=tuple(
            Length(1 + int(2_000 * rng.lognormvariate(0, 1.2)), 1 + int(200 * rng.lognormvariate(0, 0.8)))
            for _ in range(requests)
        ),
    )
