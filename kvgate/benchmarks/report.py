"""A benchmark's result: metrics by name, on what machine, as one JSON object or a table."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from kvgate.machine import gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine that the benchmark ran on; ``load_1m`` is its load average when the benchmark ended."""

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    system: str
    python: str
    load_1m: float

    @classmethod
    def here(cls) -> "Host":
        """Describe this machine."""
        return cls(
            cpu=_cpu_name(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpus=tuple(gpu.name for gpu in gpus()),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            load_1m=round(os.getloadavg()[0], 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``metrics`` maps a name that ends in its unit to a number."""

    bench: str
    host: Host
    metrics: Mapping[str, float]

    def as_json(self) -> str:
        """Return the one object that ``--json`` prints."""
        metrics = {name: _rounded(value) for name, value in self.metrics.items()}
        return json.dumps({"bench": self.bench, "host": asdict(self.host), "metrics": metrics}, indent=2)

    def as_table(self) -> Table:
        """Return the same for people."""
        accelerators = ", ".join(self.host.gpus) or "no GPU"
        table = Table(title=f"{self.bench} on {self.host.cpu}, {self.host.cores} cores, {accelerators}")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name, value in self.metrics.items():
            table.add_row(name, f"{_rounded(value):,}")
        return table

    def as_markdown(self) -> str:
        """Return the same as a Markdown table."""
        lines = [f"{self.bench} on {self.host.cpu}, {self.host.cores} cores", "", "| metric | value |", "|---|---:|"]
        return "\n".join([*lines, *(f"| {name} | {_rounded(value):,} |" for name, value in self.metrics.items())])


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


__all__ = ["Host", "Report"]
