"""An instance whose transfers fail as a fault plan says: ``engines.lmdeploy.launch`` with ``transfer_faults`` in it.

``FAULTS_VARIABLE`` in the environment names the plan's file. LMDeploy spawns its engine process, which executes this
module's top level again as ``__mp_main__``. Loads are always tried here: a tiny model computes faster than a tier with
faults loads, and a load that is declined meets no fault.
"""

import os
from pathlib import Path

from engines.lmdeploy import launch
from engines.lmdeploy.lifeline import follow_parent
from kvcontrol import agent
from tests.support.transfer_faults import FaultPlan, install_faults

FAULTS_VARIABLE = "TRANSFER_FAULTS"

if __name__ == "__mp_main__":
    follow_parent()
    launch.prepare(serving=False)
    agent.PROBE_EVERY_S = 0.0
    install_faults(FaultPlan(Path(os.environ[FAULTS_VARIABLE])))
elif __name__ == "__main__":
    launch.main()
