"""Where an instance says that it is."""

import pytest

from engines.lmdeploy.pd.transport import endpoint_of
from engines.lmdeploy.settings import EngineSettings, SettingsError
from kvcontrol.core.pd import parse_endpoint


@pytest.mark.parametrize(
    ("settings", "endpoint"),
    [
        (EngineSettings(), "127.0.0.1:7"),
        (EngineSettings(pd_host="::1"), "::1:7"),
        (EngineSettings(pd_host="0.0.0.0", pd_advertised_host="engine-0"), "engine-0:7"),  # noqa: S104 - no socket
    ],
)
def test_it_is_where_others_reach_it(settings: EngineSettings, endpoint: str) -> None:
    assert endpoint_of(settings, 7) == endpoint
    assert parse_endpoint(endpoint) is not None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "a host", "a\nb"])  # noqa: S104 - no socket
@pytest.mark.parametrize("said", ["pd_host", "pd_advertised_host"])
def test_nowhere_is_refused_with_what_to_set(said: str, host: str) -> None:
    with pytest.raises(SettingsError, match="KVGATE_ENGINE_PD_ADVERTISED_HOST"):
        endpoint_of(EngineSettings.model_validate({said: host}), 7)
