"""Which preset a command means: its name, and the hardware that is named or found."""

from collections.abc import Sequence
from typing import Final

from kvcontrol.presets import Preset, Presets, UnknownPresetError
from kvgate.failure import CommandError
from kvgate.machine import Gpu

CPU: Final = "cpu"
LAUNCHABLE: Final = frozenset({"cuda", "cpu"})
"""The devices that kvgate can start an engine on."""


def choose_preset(name: str, hardware: str | None, gpus: Sequence[Gpu]) -> Preset:
    """Return the preset for the hardware that was named, or else for what this machine has.

    Raises ``CommandError`` for an unknown name, and for a GPU that no hardware part stands for.
    """
    presets = Presets.shipped()
    if hardware is None:
        hardware = presets.recognise(gpus[0].name) if gpus else CPU
    if hardware is None:
        raise CommandError(
            f"no preset is made for {gpus[0].name}",
            f"name the hardware that is nearest with --hardware; there is {', '.join(presets.hardware)}",
        )
    try:
        return presets.preset(name, hardware)
    except UnknownPresetError as error:
        raise CommandError(str(error), "kvgate doctor lists them") from error


__all__ = ["CPU", "LAUNCHABLE", "choose_preset"]
