import pytest

from kvgate import charset
from kvgate.charset import locale_is_utf8


@pytest.mark.parametrize(
    ("encoding", "more", "utf8"),
    [
        ("UTF-8", {}, True),
        ("UTF-8", {"LANG": "C.UTF-8"}, True),
        ("ANSI_X3.4-1968", {"LC_ALL": "C"}, False),
        ("ISO-8859-1", {"LANG": "de_DE"}, False),
        ("ANSI_X3.4-1968", {"LC_ALL": "C", "PYTHONUTF8": "1"}, True),
    ],
)
def test_the_locale_says_what_can_be_drawn(
    encoding: str, more: dict[str, str], *, utf8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(charset.locale, "getencoding", lambda: encoding)
    assert locale_is_utf8() is utf8
