"""Bytes that others wrote: whoever reads them with msgspec knows all that it raises, and not its own error alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("gateway", "kvcontrol", "engines", "kvgate", "loadtests")
SPELLED_OUT = {"DecodeError", "UnicodeDecodeError", "RecursionError"}


def names_caught(block: ast.Try) -> set[str]:
    caught = [each for handler in block.handlers if handler.type is not None for each in ast.walk(handler.type)]
    return {each.attr for each in caught if isinstance(each, ast.Attribute)} | {
        each.id for each in caught if isinstance(each, ast.Name)
    }


def half_caught() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Try):
                    names = names_caught(node)
                    if "DecodeError" in names and not names >= SPELLED_OUT:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_who_expects_msgspecs_error_expects_pythons_for_text_and_depth_too() -> None:
    assert list(half_caught()) == [], "catch UNREADABLE of kvcontrol.core.errors"
