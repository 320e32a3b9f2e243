"""Errors of settings, by their names in files and in the environment."""

import difflib
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import SettingsError as SourceError

from gateway.errors import SettingsError
from kvcontrol.core.yaml_text import load_yaml

PREFIX = "KVGATE_"
_MAX_SHOWN_CHARS = 80
_SECRET = {"key", "admin_key", "registration_key", "metrics_key", "salt_secret", "store_url", "redis_url"}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a file; raises ``SettingsError``."""
    try:
        data = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise SettingsError(f"{path}: holds a {type(data).__name__}; a mapping of setting names to values is expected")
    return data


def unknown(source: str, key: str, sought: str, known: list[str]) -> str:
    """Say that there is no such setting, and which was meant."""
    close = difflib.get_close_matches(sought, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
    return f"{source}: unknown setting {key}; {hint}"


def problem(detail: Mapping[str, Any], config: Path | None, *, sections: Container[str]) -> str:
    """Return what is wrong with a value and where it came from, its name without its section; secrets are hidden."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SourceError):
        return not_json(cause)
    loc = detail["loc"][1:] if detail["loc"] and detail["loc"][0] in sections else detail["loc"]
    message = detail["msg"].removeprefix("Value error, ")
    if not loc:
        return f"settings: {message}"
    name = str(loc[0])
    variable = f"{PREFIX}{name.upper()}"
    from_environment = any(key.upper() == variable for key in os.environ)
    source = "environment" if from_environment else str(config or "settings")
    key = ".".join([variable if from_environment else name, *(str(part) for part in loc[1:])])
    value = detail.get("input")
    shown = "(hidden)" if _SECRET & {str(part) for part in loc} else _short(value)
    return f"{source}: {key} = {shown}: {message}"


def _short(value: object) -> str:
    """The value as text, without what could be a key inside it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(str(key) for key in value) + "}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def not_json(error: SourceError) -> str:
    """Say which variable of the environment is not JSON."""
    match = re.search(r'field "(\w+)"', str(error))
    name = f"{PREFIX}{match.group(1).upper()}" if match else "a list setting"
    return f'environment: {name} is not valid JSON; lists are written as JSON, for example [{{"id": "engine-0", ...}}]'
