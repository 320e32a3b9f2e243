from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import measures as module

    return module


def lines(count: int, indent: str) -> str:
    return f"{indent}pass\n" * count


def test_sizes_beyond_the_bounds_are_named_and_those_at_the_bounds_are_not(
    measures: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "a.py").write_text("def at():\n" + lines(59, "    ") + "\n" * 340)
    methods = [f"    def m{each}(self): ...\n" for each in range(21)]
    (tmp_path / "b.py").write_text(
        "".join(["class Full:\n", *methods, "class AtMost:\n", *methods[1:]])
        + "def outer():\n    async def inner():\n"
        + lines(60, "        ")
        + "\n" * 400
    )
    found = measures.measure(tmp_path, [Path("lab/a.py"), Path("b.py")])
    assert [each.name for each in found.long_files] == ["b.py"]
    assert [(each.name, each.size) for each in found.long_functions] == [("b.py:outer", 62), ("b.py:outer.inner", 61)]
    assert [(each.name, each.size) for each in found.large_classes] == [("b.py:Full", 21)]
    assert found.lines["lab"] == 400
    assert found.median_file == (400 + found.lines["b.py"]) // 2


def test_the_report_sums_the_product_apart_from_the_lab(measures: ModuleType, tmp_path: Path) -> None:
    for name, count in (("lab", 3), ("gateway", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("\n" * count)
    text = measures.report(measures.measure(tmp_path, [Path("lab/a.py"), Path("gateway/a.py")]))
    totals = dict(line.split() for line in text.splitlines()[:4])
    assert totals == {"gateway": "5", "lab": "3", "product": "5", "all": "8"}


def test_tests_are_not_counted(measures: ModuleType) -> None:
    files = measures.python_files(ROOT)
    assert Path("scripts/measures.py") in files
    assert [each for each in files if each.parts[0] == "tests"] == []
