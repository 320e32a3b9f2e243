"""Put the model that KVGATE_MODEL_NAME names into KVGATE_CACHE_DIR, once: fetched, made, or found there."""

import os
import sys
from pathlib import Path

from engines.models import smollm2, tiny
from kvgate.engine.model import embedded_model, model_from_folder, tiny_model
from kvgate.failure import CommandError


def main() -> int:
    """Return the exit code."""
    name = os.environ.get("KVGATE_MODEL_NAME", smollm2.NAME)
    try:
        if name == smollm2.NAME:
            folder = embedded_model().folder
        elif name == tiny.NAME:
            folder = tiny_model().folder
        else:
            folder = model_from_folder(Path(os.environ["KVGATE_CACHE_DIR"]) / name, None).folder
    except CommandError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
