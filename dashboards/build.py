"""``python -m dashboards.build`` writes what Grafana is given and docs/metrics.md; ``--check`` says what is stale."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dashboards import alerting
from dashboards.boards import BOARDS
from dashboards.reference import reference
from dashboards.render import render

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "dashboards" / "grafana"
ALERTING: Final = ROOT / "deploy" / "grafana" / "provisioning" / "alerting"


def built() -> dict[Path, str]:
    """Return every file that is made, and its text."""
    return {FOLDER / f"{board.uid}.json": render(board) for board in BOARDS} | {
        ROOT / "docs" / "metrics.md": reference(),
        ALERTING / "rules.yaml": alerting.rules(),
        ALERTING / "notifications.yaml": alerting.notifications(),
    }


def stale(files: Mapping[Path, str]) -> list[Path]:
    """Return what is missing, different, or left over."""
    wrong = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return wrong + [path for path in (*FOLDER.glob("*.json"), *ALERTING.glob("*")) if path not in files]


def main() -> int:
    """Build or check; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 when something is not as built"
    )
    files = built()
    wrong = stale(files)
    if parser.parse_args().check:
        for path in wrong:
            sys.stderr.write(
                f"{path.relative_to(ROOT)} is not what dashboards/ makes of the catalogue: run make docs\n"
            )
        return int(bool(wrong))
    for path in wrong:
        if path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
