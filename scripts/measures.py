"""Print how large the code is: lines by package, files, functions and classes that are longer than they should be.

Counts cover Python files outside tests. A line is a line of the file, blank lines and comments included.
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_FILE = 400
LONG_FUNCTION = 60
MANY_METHODS = 20
LAB = "lab"
NOT_COUNTED = {"tests", "build", "dist", "artifacts"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A file, function or class with the size that counts for it: lines or methods."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The sizes of a tree of Python files."""

    lines: Counter[str]
    median_file: int
    long_files: list[Part]
    long_functions: list[Part]
    large_classes: list[Part]


def main() -> int:
    """Print the measures of the repository; return the process's exit code."""
    print(report(measure(ROOT, python_files(ROOT))))
    return 0


def python_files(root: Path) -> list[Path]:
    """Return the Python files outside tests and outside what builds and tools leave, sorted."""
    found = (each.relative_to(root) for each in root.glob("*/**/*.py"))
    return sorted(each for each in found if each.parts[0] not in NOT_COUNTED and not each.parts[0].startswith("."))


def measure(root: Path, files: list[Path]) -> Measures:
    """Return the measures of `files`, which are relative to `root`."""
    sources = {each: (root / each).read_text(encoding="utf-8") for each in files}
    lengths = {each: len(text.splitlines()) for each, text in sources.items()}
    lines: Counter[str] = Counter()
    for each, length in lengths.items():
        lines[each.parts[0]] += length
    long_files = [Part(name=str(each), size=length) for each, length in lengths.items() if length > LONG_FILE]
    functions: list[Part] = []
    classes: list[Part] = []
    for each, text in sources.items():
        for name, node in definitions(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, _Function) for part in node.body)
                if methods > MANY_METHODS:
                    classes.append(Part(name=f"{each}:{name}", size=methods))
            elif (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONG_FUNCTION:
                functions.append(Part(name=f"{each}:{name}", size=length))
    return Measures(
        lines=lines,
        median_file=int(statistics.median(lengths.values())) if lengths else 0,
        long_files=long_files,
        long_functions=functions,
        large_classes=classes,
    )


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function | ast.ClassDef]]:
    """Yield every function and class below `tree` with its dotted name, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def report(measures: Measures) -> str:
    """Return the measures as text, the largest parts first."""
    total = measures.lines.total()
    lab = measures.lines[LAB]
    rows = [f"{name:<14}{count:>8,}" for name, count in measures.lines.most_common()]
    rows += [f"{'product':<14}{total - lab:>8,}", f"{'all':<14}{total:>8,}", ""]
    rows.append(f"median file: {measures.median_file} lines")
    for title, parts in (
        (f"files over {LONG_FILE} lines", measures.long_files),
        (f"functions over {LONG_FUNCTION} lines", measures.long_functions),
        (f"classes over {MANY_METHODS} methods", measures.large_classes),
    ):
        outside = sum(not each.name.startswith(f"{LAB}/") for each in parts)
        rows.append(f"{title}: {len(parts)} ({outside} outside {LAB}/)")
        rows += [f"  {each.size:>5}  {each.name}" for each in sorted(parts, key=lambda each: -each.size)]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
