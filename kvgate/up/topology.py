"""Which instances prefill, which decode, which do both: as ``kvgate up --topology`` names it."""

import re
from dataclasses import dataclass
from typing import Self

from kvcontrol.core.roles import EngineRole
from kvgate.failure import CommandError

ALIASES = {"pd": "1p1d"}
_SEPARATED = re.compile(r"([1-9]\d?)p([1-9]\d?)d")
HYBRID_NAME = "hybrid"


@dataclass(frozen=True, slots=True)
class Topology:
    """The role of each instance, in their order; empty: as many hybrid ones as are asked for."""

    roles: tuple[EngineRole, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``hybrid``, ``pd``, or ``1p1d``, ``1p2d``, ``2p1d`` and so on; raises ``CommandError``."""
        name = ALIASES.get(text.lower(), text.lower())
        if name == HYBRID_NAME:
            return cls()
        found = _SEPARATED.fullmatch(name)
        if found is None:
            raise CommandError(
                f"--topology {text} is unknown",
                "allowed: hybrid, pd (one prefill and one decode instance), or counts such as 1p1d, 1p2d, 2p1d",
            )
        prefill, decode = int(found.group(1)), int(found.group(2))
        return cls((EngineRole.PREFILL,) * prefill + (EngineRole.DECODE,) * decode)

    @property
    def separated(self) -> bool:
        """Whether prompts may be computed by one instance and answered by another."""
        return bool(self.roles)

    def count(self, requested: int | None, default: int) -> int:
        """Return how many instances there are; raises ``CommandError`` when ``requested`` says otherwise."""
        if not self.roles:
            return default if requested is None else requested
        if requested is not None and requested != len(self.roles):
            raise CommandError(f"--topology has {len(self.roles)} instances, --instances is {requested}", "omit one")
        return len(self.roles)

    def role(self, index: int) -> EngineRole:
        """Return what the instance at a place is for."""
        return self.roles[index] if self.roles else EngineRole.HYBRID


ALL_HYBRID = Topology()
