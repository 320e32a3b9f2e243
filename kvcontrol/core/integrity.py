"""What the own checks of an optimised structure say when something contradicts itself."""


def must(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as an assertion
    """Raise ``AssertionError`` with ``otherwise`` unless it ``holds``; not an ``assert``, which ``-O`` leaves out."""
    if not holds:
        raise AssertionError(otherwise)
