"""What the kernels of a chunk that overlaps with decode steps do otherwise, while it is launched. The engine's thread.

FlashAttention-3 holds every multiprocessor for the whole of a layer; here it leaves some to the decode steps. CUDA
graphs of prompts share their memory with those of decode steps, so such a chunk runs eagerly. To launch it takes the
host three decode steps, so it is launched some layers at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

LAYERS_AT_ONCE: Final = 10
"""After so many layers the next decode step is launched: 15 ms of a 7B model."""


@dataclass(slots=True)
class _Launch:
    pause: Callable[[], None] | None = None
    reserved_multiprocessors: int = 0
    layers: int = 0

    @property
    def is_overlapped(self) -> bool:
        return self.pause is not None

    def layer(self) -> None:
        """A layer's attention is launched next."""
        if self.pause is not None:
            self.layers += 1
            if self.layers > LAYERS_AT_ONCE:
                self.layers = 1
                self.pause()


launch = _Launch()
"""What is being launched now."""


@contextmanager
def overlapped(pause: Callable[[], None], reserved_multiprocessors: int) -> Iterator[None]:
    """Launch a part of an overlapping chunk inside; ``pause`` returns from it."""
    launch.pause, launch.reserved_multiprocessors = pause, reserved_multiprocessors
    try:
        yield
    finally:
        launch.pause, launch.reserved_multiprocessors = None, 0


def launch_in_parts(implementation: Any) -> None:
    """Let an overlapping chunk pause between this layer's attention and the one before."""
    prefill = implementation._forward_prefill  # noqa: SLF001 - LMDeploy's, which the hook extends

    def forward_prefill(*arguments: Any, **more: Any) -> Any:
        launch.layer()
        return prefill(*arguments, **more)

    implementation._forward_prefill = forward_prefill  # noqa: SLF001
