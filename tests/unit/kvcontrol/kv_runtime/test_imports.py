import subprocess
import sys

from tests.support.killed import ROOT

_WITHOUT = """
import sys
sys.modules |= {"torch": None, "numpy": None}
import kvcontrol.kv_runtime
import kvcontrol.kv_runtime.backends.file
"""


def test_the_runtime_and_its_files_need_neither_torch_nor_numpy() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT], cwd=ROOT, timeout=120, check=True)
