from importlib.metadata import PackageNotFoundError

import pytest

from engines.lmdeploy.compat import IncompatibleEngineError, require_known_good


def test_the_installed_versions_are_known_good() -> None:
    require_known_good()


@pytest.mark.parametrize(
    ("lmdeploy", "torch", "named"),
    [("0.17.1", "2.13.0", "LMDeploy 0.17.1"), ("0.18.0", "2.9.1", "torch 2.9.1"), ("0.18.0", "2.14.0", "torch 2.14.0")],
)
def test_other_versions_are_refused_with_the_list_of_good_ones(lmdeploy: str, torch: str, named: str) -> None:
    with pytest.raises(IncompatibleEngineError) as refusal:
        require_known_good({"lmdeploy": lmdeploy, "torch": torch}.__getitem__)
    assert named in str(refusal.value)
    assert "0.18.0 with torch" in str(refusal.value)


def test_a_build_of_a_known_good_torch_is_fine() -> None:
    require_known_good({"lmdeploy": "0.18.0", "torch": "2.13.0+cpu"}.__getitem__)


def test_a_missing_package_is_named() -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    with pytest.raises(IncompatibleEngineError, match="lmdeploy is not installed"):
        require_known_good(absent)
