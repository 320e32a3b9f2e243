"""Full garbage collections without all that a process has loaded."""

import gc

ENGINE_YOUNG_OBJECTS = 50_000
"""What an engine makes between two collections. A prompt of 100,000 tokens makes 10,000 objects: with Python's 700 each
one meets several, of which one that finds an earlier prompt's remains took 11 ms between a load and its first token."""


def freeze_garbage(*, young_objects: int | None = None) -> None:
    """Leave what is there now out of later garbage collections, which come every ``young_objects`` (None: as before).

    Modules, an engine's model and compiled kernels are up to a million objects that stay; a full collection walks all
    of them, on the thread that serves, while requests wait. Once per process, when all is loaded: what becomes garbage
    of these later is not found.
    """
    gc.collect()
    gc.freeze()
    if young_objects is not None:
        gc.set_threshold(young_objects, *gc.get_threshold()[1:])


__all__ = ["ENGINE_YOUNG_OBJECTS", "freeze_garbage"]
