"""What the pages promise is what is there."""

import re
from pathlib import Path

import typer.main

from engines.models import smollm2
from kvgate.app import build_app
from kvgate.engine.model import Model
from kvgate.up.announce import curl
from kvgate.up.options import DEFAULT_PORT
from kvgate.up.stack import GatewayOptions, Routing

ROOT = Path(__file__).resolve().parents[3]


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line.split()[:2] for line in lines[2:4]] == [["make", "up"], ["make", "test"]]


def test_the_readmes_curl_is_the_one_that_kvgate_up_prints() -> None:
    model = Model(folder=Path("/m"), name=smollm2.NAME)
    gateway = GatewayOptions(
        host="127.0.0.1", port=DEFAULT_PORT, api_keys=(), routing=Routing.COST_AWARE, state_dir=Path("/s")
    )
    assert f"    {curl(gateway, model)}\n" in (ROOT / "README.md").read_text()


def test_no_page_speaks_of_a_command_that_is_not_there() -> None:
    commands = set(typer.main.get_command(build_app()).list_commands(None))  # type: ignore[attr-defined, arg-type]
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "operations.md"):
        for named in re.findall(r"(?:`|^ {4})kvgate ([a-z]+)", page.read_text(), re.MULTILINE):
            assert named in commands, f"{page.name} speaks of kvgate {named}"


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "docs" / "operations.md"):
        for named in re.findall(r"(?:`|^ {4})make ([a-z]+)", page.read_text(), re.MULTILINE):
            assert named in targets, f"{page.name} speaks of make {named}"


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_link_to_a_section_leads_to_a_heading() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / target if target else page).read_text()
            headings = re.findall(r"(?m)^#{1,6} (.+)$", text)
            anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_the_pages_of_performance_are_read_in_two_screens_and_name_their_commands() -> None:
    pages = [each for each in (ROOT / "docs" / "performance").glob("*.md") if each.name != "README.md"]
    assert len(pages) >= 4
    for page in pages:
        text = page.read_text()
        assert len(text.splitlines()) <= 120, page.name
        assert re.search(r"(?m)^    kvgate bench ", text), page.name
