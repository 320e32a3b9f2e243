"""LMDeploy's own api_server with nothing of kvgate in it but, where there is no GPU, the CPU back end.

    python -m engines.lmdeploy.benchmarks.stock serve api_server MODEL --backend pytorch ...

What ``kvgate bench served`` sets beside ours. Like ``launch``, the top level runs again in the spawned engine process.
"""

import os
import sys

from engines.lmdeploy.lifeline import follow_parent


def prepare() -> None:
    """Turn the CPU back end on where there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        from engines.lmdeploy.cpu import activate

        activate()
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in launch.py: it belongs to the CPU back end


if __name__ in {"__main__", "__mp_main__"}:
    if __name__ == "__mp_main__":
        follow_parent()
    prepare()
    if __name__ == "__main__":
        from lmdeploy.cli.entrypoint import run

        sys.argv[0] = "stock-lmdeploy"
        run()
