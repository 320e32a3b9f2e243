"""Whether the packages that run an engine are installed: the extra ``engine``, which a gateway does without."""

import importlib.util
from typing import Final

from kvgate.failure import CommandError

ENGINE_ADVICE: Final = "pip install 'kvgate[engine]' (make setup in a checkout)"
_NEEDED: Final = ("lmdeploy", "torch")


def need_engine_extra() -> None:
    """Raise ``CommandError`` where LMDeploy or PyTorch is not installed. It imports neither."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"an engine needs {' and '.join(missing)}, and this installation has no such package",
            f"install the engine: {ENGINE_ADVICE}",
        )
