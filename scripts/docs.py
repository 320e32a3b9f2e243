"""Write the table of the gateway's settings into docs/operations.md from the settings, or check it (``--check``)."""

import re
import sys
from pathlib import Path

from gateway.settings import Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
HEAD = "| variable | default | meaning |\n|---|---|---|\n"
SECTION = "## Settings of the gateway"


def main() -> int:
    """Write or check the page; return the process's exit code."""
    page = PAGE.read_text()
    wanted = with_table(page)
    if sys.argv[1:] == ["--check"]:
        if page != wanted:
            print("docs/operations.md describes other settings than the gateway has: run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted)
    return 0


def with_table(page: str) -> str:
    """Return the page with the rows of its settings table made anew."""
    rows = "".join(
        f"| `KVGATE_{name.upper()}` | {_default(name)} | {field.description} |\n"
        for name, field in Settings.model_fields.items()
    )
    before, section, after = page.partition(SECTION)
    return before + section + re.sub(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: HEAD + rows, after, count=1)


def _default(name: str) -> str:
    if name == "state_dir":
        return "`~/.local/state/kvgate`"
    default = Settings.model_fields[name].default
    return "none" if default in (None, ()) else f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
