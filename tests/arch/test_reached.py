"""Every module of the product is reached by something that people or kvgate itself start."""

from pathlib import Path

from tests.support.reach import Sources

ROOT = Path(__file__).parents[2]
PRODUCT = ("kvgate", "gateway", "kvcontrol", "engines", "dashboards", "loadtests")
STARTED = (
    "kvgate.__main__",  # the console script
    "gateway.__main__",
    "engines.sim.__main__",
    "engines.lmdeploy.launch",  # an engine's two processes
    "dashboards.build",
    "loadtests.locustfile",
)


def test_the_product_has_no_module_that_nothing_started_reaches() -> None:
    sources = Sources(ROOT, PRODUCT)
    assert sorted(set(sources) - sources.reached(*STARTED)) == []


def test_a_module_of_the_lab_is_imported_or_started_by_hand() -> None:
    sources = Sources(ROOT, (*PRODUCT, "lab"))
    by_hand = {name for name in sources if name.startswith("lab.") and sources.is_program(name)}
    tested = {name for name in sources if name.startswith("lab.research.")}
    left = set(sources) - sources.reached(*STARTED, "lab.commands", *by_hand, *tested)
    assert sorted(left) == []


def test_an_import_inside_a_function_and_a_module_named_by_string_count(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "house/main.py",
        "def f():\n    from house.parts import run\n\ndef g():\n    from house.more import run\n\n"
        "RUN = ['-m', 'house.worker']\n",
    )
    for name in ("parts", "more", "worker", "alone"):
        _write(tmp_path, f"house/{name}.py", "")
    assert _unreached(tmp_path) == ["house.alone"]


def test_a_package_that_lists_a_name_does_not_reach_its_module_but_an_importer_of_the_name_does(tmp_path: Path) -> None:
    _write(tmp_path, "house/main.py", "from house.parts import used\n")
    _write(
        tmp_path,
        "house/parts/__init__.py",
        "from house.parts.a import used\nfrom house.parts.b import listed\nfrom house.parts.c import kind\n"
        "KINDS = {'kind': kind}\n__all__ = ['listed', 'used']\n",
    )
    for name, text in (("a", "used = 1"), ("b", "listed = 1"), ("c", "kind = 1")):
        _write(tmp_path, f"house/parts/{name}.py", text)
    assert _unreached(tmp_path) == ["house.parts.b"]


def _write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "house/__init__.py").touch()
    (root / name).write_text(text)


def _unreached(root: Path) -> list[str]:
    sources = Sources(root, ("house",))
    return sorted(set(sources) - sources.reached("house.main"))
