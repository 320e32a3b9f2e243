"""The page that walks through the code: what it names is there, and a way through has at most ten hops."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_TOP = {each.name for each in ROOT.iterdir() if each.is_dir()}
_PATH = re.compile(r"`([a-z_]+/[\w./-]*)`")


def named_paths() -> list[str]:
    return [path for path in _PATH.findall(PAGE) if path.partition("/")[0] in _TOP]


def test_every_path_that_the_page_names_exists() -> None:
    paths = named_paths()
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_subpackage_of_gateway_engines_and_kvcontrol_is_on_the_page() -> None:
    named = "\n".join(f"{path.rstrip('/')}/" for path in named_paths())
    packages = [
        each.relative_to(ROOT).as_posix()
        for parent in ("gateway", "engines", "kvcontrol")
        for each in sorted((ROOT / parent).iterdir())
        if (each / "__init__.py").exists()
    ]
    assert [each for each in packages if f"{each}/" not in named] == []


def test_a_way_through_the_house_has_at_most_ten_hops_and_each_names_a_file() -> None:
    ways = re.findall(r"(?ms)^### (.+?)\n(.*?)(?=^#)", PAGE)
    assert [title for title, _ in ways] == ["A chat", "A block", "A policy swap"]
    for title, text in ways:
        hops = re.split(r"(?m)^\d+\. ", text)[1:]
        assert 5 <= len(hops) <= 10, title
        assert [hop for hop in hops if not re.search(r"`[a-z_/]+\.py`", hop)] == [], title
