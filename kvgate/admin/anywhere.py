"""The options of ``kvgate admin`` that stand before or after its subcommands."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from typer.core import TyperGroup

WITH_VALUE: Final = frozenset({"--url", "--admin-key", "--state-dir"})
FLAGS: Final = frozenset({"--json"})


class AnywhereGroup(TyperGroup):
    """Reads the options of the whole group wherever they stand: no subcommand has one of the same name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with these options in front."""
        return super().parse_args(ctx, _in_front(args))


def _in_front(args: Sequence[str]) -> list[str]:
    front: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in FLAGS or ("=" in word and word.partition("=")[0] in WITH_VALUE):
            front.append(word)
        elif word in WITH_VALUE:
            front += [word, *islice(words, 1)]
        else:
            rest.append(word)
    return front + rest
