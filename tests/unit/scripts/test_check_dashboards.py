from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER = "node_modules/.bin/tsc"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_dashboards as module

    return module


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """An npm that does what it is told, and nothing else in the path."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def written(text: str) -> None:
        path = tmp_path / "npm"
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
        path.chmod(0o755)

    return written


def ending(code: int) -> str:
    """What installs a compiler that ends so."""
    return f"mkdir -p node_modules/.bin; printf '#!/bin/sh\\nexit {code}\\n' > {COMPILER}; chmod +x {COMPILER}"


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        (None, 0, "npm is not installed"),
        ("exit 1", 0, "npm does not reach its registry"),
        ('[ "$1" = view ]', 1, ""),
        (ending(0), 0, "files are as the types of Grafana"),
        (ending(2), 2, ""),
    ],
)
@pytest.mark.usefixtures("npm")
def test_what_could_not_be_checked_is_said_and_what_is_wrong_is_a_failure(
    does: str | None, code: int, said: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    check: ModuleType = request.getfixturevalue("check")
    if does is not None:
        request.getfixturevalue("npm")(does)
    assert check.main() == code
    assert said in capsys.readouterr().out
