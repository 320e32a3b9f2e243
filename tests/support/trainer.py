"""A trainer that broadcasts a model's weights to an engine, in a process of its own and over gloo."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.host.ports import LOOPBACK, free_ports
from tests.support.weights import read_weights

GROUP = "trainer"
_TRAINER = """
import sys
from pathlib import Path

import torch
from lmdeploy.utils import init_custom_process_group
from tests.support.weights import read_weights

folder, address = sys.argv[1:]
group = init_custom_process_group(
    backend="gloo", init_method=address, world_size=2, rank=0, group_name="trainer"
)
for name, array in sorted(read_weights(Path(folder)).items()):
    torch.distributed.broadcast(torch.from_numpy(array), src=0, group=group)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What an engine has to know of it."""

    port: int
    folder: Path

    @property
    def group_request(self) -> Any:
        """The request by which an engine joins its group."""
        from lmdeploy.serve.openai.protocol import InitWeightsUpdateGroupRequest

        return InitWeightsUpdateGroupRequest(
            master_address=LOOPBACK,
            master_port=self.port,
            rank_offset=1,
            world_size=2,
            group_name=GROUP,
            backend="gloo",
        )

    @property
    def weights_request(self) -> Any:
        """The request by which an engine receives all weights."""
        from lmdeploy.serve.openai.protocol import UpdateWeightsFromDistributedRequest

        tensors = sorted(read_weights(self.folder).items())
        return UpdateWeightsFromDistributedRequest(
            names=[name for name, _ in tensors],
            dtypes=[str(array.dtype) for _, array in tensors],
            shapes=[list(array.shape) for _, array in tensors],
            group_name=GROUP,
            finished=True,
        )


@contextmanager
def training(folder: Path) -> Iterator[Trainer]:
    """Run a trainer with a folder's weights; it ends with the block."""
    [port] = free_ports(1)
    address = f"tcp://{LOOPBACK}:{port}"
    process = subprocess.Popen([sys.executable, "-c", _TRAINER, str(folder), address], stdin=subprocess.PIPE)
    try:
        yield Trainer(port=port, folder=folder)
    finally:
        process.kill()
        process.communicate()


__all__ = ["Trainer", "training"]
