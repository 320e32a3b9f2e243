"""The version of the installed package."""

import importlib.metadata


def installed_version() -> str:
    """Return the version of kvgate; ``source`` where the code runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("kvgate")
    except importlib.metadata.PackageNotFoundError:
        return "source"
