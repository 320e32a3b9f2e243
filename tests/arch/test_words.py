"""Names and pages use the words of docs/glossary.md, not the dialect that they replaced."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("gateway", "engines", "kvcontrol", "kvgate")

NAMES = {
    "acts": "operations",
    "asked": "requested, or the noun",
    "desk": "the package's subject",
    "door": "admission",
    "owe": "must restore",
    "paid": "restored",
    "rider": "the noun",
    "said": "parsed, reply, message, or the noun",
    "says": "reports, contains",
    "tells": "reports, sends",
    "told": "sent, reported, or the noun",
    "untold": "pending",
    "wish": "desired",
    "wishes": "desired",
}
"""Parts of names, each with its replacement."""

PHRASES = {
    r"\b(?:is|are|was|were|be|been|being) told\b": "receives, or: X sends Y to Z",
    r"\b(?:told|tells?) (?:anew|again|to\b)": "sends again, resync, snapshot",
    r"\bput off\b": "deferred",
    r"\bas many as may\b": "the limit is reached",
    r"\bwhat may be\b": "the allowed values",
    r"\bturned away\b": "shed",
    r"\bwho(?:ever)? (?:may|has|holds|chooses|waits)\b": "name the caller or the part",
}
"""Phrases of pages, each with its replacement. Code in backticks and blocks of code are not prose."""

PAGES = sorted((ROOT / "README.md", *(ROOT / "docs").rglob("*.md")), key=lambda path: path.relative_to(ROOT).as_posix())


def _parts(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def _names(path: Path) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]


@pytest.mark.parametrize("package", PRODUCT)
def test_names_of_the_product_use_words_of_the_field(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}; write: {NAMES[part]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in [(0, path.stem), *_names(path)]
        for part in sorted(_parts(name) & NAMES.keys())
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_use_words_of_the_field(page: Path) -> None:
    if page.name == "glossary.md":
        pytest.skip("names the words that are replaced")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", text)
    found = [
        f"{match[0]!r}; write: {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(phrase, prose, flags=re.IGNORECASE)
    ]
    assert found == []
