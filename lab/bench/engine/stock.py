"""LMDeploy's own api_server with nothing of kvgate in it but how its processes start and end, and a CPU back end.

    python -m lab.bench.engine.stock serve api_server MODEL --backend pytorch ...

What ``kvgate bench served`` sets beside ours. Like ``launch``, the top level runs again in the spawned engine process,
which without our hook dies at a start in which its parent is quicker.
"""

import os
import sys

from engines.lmdeploy.lifeline import follow_parent


def prepare() -> None:
    """Install what starts and ends processes, and turn the CPU back end on where there is no CUDA device."""
    import torch

    from engines.lmdeploy.hooks import lifeline_hooks
    from engines.lmdeploy.patching import install

    if not torch.cuda.is_available():
        from engines.lmdeploy.cpu import activate

        activate()
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in launch.py: it belongs to the CPU back end
    install(lifeline_hooks())


if __name__ in {"__main__", "__mp_main__"}:
    if __name__ == "__mp_main__":
        follow_parent()
    prepare()
    if __name__ == "__main__":
        from lmdeploy.cli.entrypoint import run

        sys.argv[0] = "stock-lmdeploy"
        run()
