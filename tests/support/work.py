"""How much Python work a call is: a number that doesn't depend on the machine or on what else it does."""

import gc
import sys
from collections.abc import Callable


def steps(call: Callable[[], object]) -> int:
    """Return how many functions and generators were entered or resumed on this thread, but for garbage collections',
    which call whoever listens to them.
    """
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        del frame, argument
        count += event in {"call", "c_call"}

    before, collected = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collected:
            gc.enable()
    return count
