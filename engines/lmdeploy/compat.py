"""Which LMDeploy and torch kvgate's hooks are known to fit; anything else is refused at start-up.

Every hook stands on private symbols, so a version is added to the list only after the contract tests
(``tests/contract``) and the engine tests (``tests/lmdeploy``) passed on it.
"""

from collections.abc import Callable
from importlib import metadata

from packaging.specifiers import SpecifierSet

KNOWN_GOOD_LMDEPLOY = ("0.18.0",)
KNOWN_GOOD_TORCH = SpecifierSet(">=2.10,<2.14")


class IncompatibleEngineError(RuntimeError):
    """The installed LMDeploy or torch is missing or not one that kvgate's hooks are known to fit."""


def require_known_good(version_of: Callable[[str], str] = metadata.version) -> None:
    """Return when the installed versions are known good.

    Raises ``IncompatibleEngineError`` naming what was found and what is allowed. ``version_of`` raises
    ``PackageNotFoundError`` for what isn't installed.
    """
    allowed = f"known good: LMDeploy {' or '.join(KNOWN_GOOD_LMDEPLOY)} with torch {KNOWN_GOOD_TORCH}"
    found = {}
    for package in ("lmdeploy", "torch"):
        try:
            found[package] = version_of(package)
        except metadata.PackageNotFoundError as error:
            raise IncompatibleEngineError(f"{package} is not installed ({allowed})") from error
    if found["lmdeploy"] not in KNOWN_GOOD_LMDEPLOY:
        raise IncompatibleEngineError(f"LMDeploy {found['lmdeploy']} is installed ({allowed})")
    if not KNOWN_GOOD_TORCH.contains(found["torch"], prereleases=True):
        raise IncompatibleEngineError(f"torch {found['torch']} is installed ({allowed})")
