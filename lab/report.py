"""A benchmark's result: metrics by name, on what machine, as one JSON object or a table."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kvgate.host.machine import gpus


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


Cell = str | int | float | None
"""A cell of a grid; None stands for "there is no such thing"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Results with more than one dimension: a row for each case, a column for each of its properties and figures."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def as_objects(self) -> list[dict[str, Cell]]:
        """Return a mapping from column to cell for each row."""
        return [
            {column: _rounded(cell) if isinstance(cell, float) else cell for column, cell in self._cells(row)}
            for row in self.rows
        ]

    def _cells(self, row: tuple[Cell, ...]) -> Iterator[tuple[str, Cell]]:
        return zip(self.columns, row, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``metrics`` maps a name that ends in its unit to a number, a count to a whole one; ``not_run`` what is missing to
    the reason.
    """

    bench: str
    host: Host
    metrics: Mapping[str, float]
    grids: tuple[Grid, ...] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """Return the one object that ``--json`` prints; each grid is a list of objects under its name."""
        said: dict[str, object] = {
            "bench": self.bench,
            "host": asdict(self.host),
            "metrics": {name: _rounded(value) for name, value in self.metrics.items()},
        }
        said |= {grid.name: grid.as_objects() for grid in self.grids}
        if self.not_run:
            said["not_run"] = dict(self.not_run)
        return json.dumps(said, indent=2)

    def as_tables(self) -> list[Table]:
        """Return the same for people."""
        return [_table(f"{self.bench} on {self._where()}", self._metrics()), *(_table(g.name, g) for g in self._more())]

    def as_markdown(self) -> str:
        """Return the same as Markdown tables."""
        parts = [f"{self.bench} on {self._where()}", _markdown(self._metrics())]
        for grid in self._more():
            parts += [f"**{grid.name}**", _markdown(grid)]
        return "\n\n".join(parts)

    def _where(self) -> str:
        accelerators = ", ".join(self.host.gpus) or "no GPU"
        return f"{self.host.cpu}, {self.host.cores} cores, {accelerators}, load average {self.host.load_1m}"

    def _metrics(self) -> Grid:
        return Grid(name=self.bench, columns=("metric", "value"), rows=tuple(self.metrics.items()))

    def _more(self) -> list[Grid]:
        missing = Grid(name="not run", columns=("what", "why"), rows=tuple(self.not_run.items()))
        return [*self.grids, *([missing] if self.not_run else [])]


def _table(title: str, grid: Grid) -> Table:
    table = Table(title=escape(title))
    for place, column in enumerate(grid.columns):
        numbers = any(isinstance(row[place], int | float) for row in grid.rows)
        table.add_column(escape(column), justify="right" if numbers else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(escape(_shown(cell)) for cell in row))
    return table


def _markdown(grid: Grid) -> str:
    numbers = [any(isinstance(row[place], int | float) for row in grid.rows) for place in range(len(grid.columns))]
    lines = [grid.columns, tuple("---:" if right else "---" for right in numbers)]
    lines += [tuple(_shown(cell).replace("|", "\\|") for cell in row) for row in grid.rows]
    head, rule, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, rule.replace(" ", ""), *rows])


def _shown(cell: Cell) -> str:
    match cell:
        case None:
            return "-"
        case float():
            return f"{_rounded(cell):,}"
        case int():
            return f"{cell:,}"
        case str():
            return cell


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise. Whole numbers are counts, and stay exact."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
