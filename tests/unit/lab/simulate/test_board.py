"""How far a fleet has come is told on a terminal and elsewhere."""

import io

from rich.console import Console

from lab.simulate.board import FleetBoard


def test_elsewhere_than_in_a_terminal_a_line_comes_at_times() -> None:
    console = Console(file=io.StringIO(), width=200)
    clock = iter((0.0, 1.0, 6.0, 8.0, 12.0))
    with FleetBoard(console, clock=lambda: next(clock)).shown("cost_aware", 100.0) as told:
        for virtual_s in (5.0, 25.0, 30.0, 100.0):
            told(virtual_s)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "  cost_aware: 25 of 100 s of virtual time (25%) after 6 s, about 18 s to go",
        "  cost_aware: 100 of 100 s of virtual time (100%) after 12 s, about 0 s to go",
    ]


def test_a_terminal_has_a_bar() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with FleetBoard(console).shown("8 x [lru]", 100.0) as told:
        told(40.0)
        told(400.0)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "8 x [lru]" in said
    assert "100 of 100 s of virtual time" in said
