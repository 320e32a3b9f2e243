"""The options that ``kvgate engine`` and ``kvgate up`` have in common."""

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.engine.instance import EngineLimits
from kvgate.engine.tier_flags import TierFlags
from kvgate.engine.units import with_kv_memory
from kvgate.failure import CommandError
from kvgate.host.machine import Device

ENGINES: Final = "Engines"
MOST_ITL_TARGET_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions(TierFlags):
    """Each field is an option as it was typed; None where one wasn't."""

    device: Annotated[
        Device, typer.Option(help="Device; auto: the visible GPUs, else the CPU.", rich_help_panel=ENGINES)
    ] = Device.AUTO
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV block: 16, 32, 64, ... Default: 16 on CPU, 64 on GPU.", rich_help_panel=ENGINES
        ),
    ] = None
    kv_blocks: Annotated[
        int | None, typer.Option(min=16, help="KV blocks of each engine.", rich_help_panel=ENGINES)
    ] = None
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="KV memory of each engine: an amount on CPU (2GiB), a share of the free memory on GPU (40%).",
            rich_help_panel=ENGINES,
        ),
    ] = None
    kv_quant: Annotated[
        KVQuantisation | None,
        typer.Option(
            help="How KV is stored: fp8 and int8 halve it, int4 quarters it, at a cost in accuracy. "
            "Default: the preset's, else none.",
            rich_help_panel=ENGINES,
        ),
    ] = None
    max_batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Largest batch of an engine: requests that run at once.", rich_help_panel=ENGINES),
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each engine.", rich_help_panel=ENGINES)] = (
        None
    )
    itl_target: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MOST_ITL_TARGET_MS,
            help="Target of the inter-token latency beside prefills, in milliseconds; 0: no target. "
            "Default: the preset's, else 55 on GPU, none on CPU.",
            rich_help_panel=ENGINES,
        ),
    ] = None

    @property
    def limits(self) -> EngineLimits:
        """The limits of an engine, without its tiers. Raises ``CommandError`` for a value that no engine takes."""
        if self.itl_target is not None and 0 < self.itl_target < 1:
            raise CommandError(f"--itl-target is {self.itl_target:g} ms", "it must be 1 or more; 0 is no target")
        limits = EngineLimits(
            block_tokens=self.block_size,
            kv_blocks=self.kv_blocks,
            max_batch_size=self.max_batch_size,
            cpu_threads=self.threads,
            itl_target_ms=self.itl_target,
            kv_quantisation=self.kv_quant,
        )
        return with_kv_memory(limits, self.kv_memory)
