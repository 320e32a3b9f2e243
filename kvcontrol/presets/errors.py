"""Errors of presets.

KvControlError
└── PresetError
    ├── PresetFileError     the file is not what the schema allows; one line a problem
    └── UnknownPresetError  nobody defined a preset or hardware of that name
"""

from kvcontrol.core.errors import KvControlError


class PresetError(KvControlError, ValueError):
    """Base of what can be wrong with presets."""


class PresetFileError(PresetError):
    """The file can't be used. Each line of the message names the file with its line, the key, its value and what is
    allowed.
    """


class UnknownPresetError(PresetError):
    """No preset or hardware has that name; the message says which ones there are."""
