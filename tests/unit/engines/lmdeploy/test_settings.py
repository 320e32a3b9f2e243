"""Settings out of the environment: defaults that work, errors that name variable, value and what is allowed."""

import pytest

from engines.lmdeploy.settings import EngineSettings, SettingsError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in EngineSettings.model_fields:
        monkeypatch.delenv(f"KVGATE_ENGINE_{field.upper()}", raising=False)


def test_nothing_set_means_free_ports_on_loopback() -> None:
    settings = EngineSettings.load()
    assert settings.events_endpoint == settings.replay_endpoint == "tcp://127.0.0.1:*"
    assert settings.control_endpoint is None


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_ENDPOINT", "tcp://127.0.0.1:5557")
    monkeypatch.setenv("KVGATE_ENGINE_CONTROL_ENDPOINT", "ipc:///run/kvgate/control")
    monkeypatch.setenv("KVGATE_ENGINE_CPU_THREADS", "2")
    settings = EngineSettings.load()
    assert settings.events_endpoint == "tcp://127.0.0.1:5557"
    assert settings.control_endpoint == "ipc:///run/kvgate/control"
    assert settings.cpu_threads == 2


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("EVENTS_ENDPOINT", "127.0.0.1:5557", "must start with tcp:// or ipc://"),
        ("REPLAY_ENDPOINT", "", "must start with tcp:// or ipc://"),
        ("CONTROL_ENDPOINT", "tcp://0.0.0.0:9", "must be ipc:// and an absolute path"),
        ("CONTROL_ENDPOINT", "ipc:///" + "x" * 120, "may have at most 100 bytes"),
        ("CONTROL_TIMEOUT_S", "0", "greater than 0"),
        ("CPU_THREADS", "many", "valid integer"),
        ("EVENTS_PENDING_BLOCKS", "-1", "greater than or equal to 1"),
    ],
)
def test_an_invalid_setting_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str) -> None:
    monkeypatch.setenv(f"KVGATE_ENGINE_{variable}", value)
    with pytest.raises(SettingsError) as caught:
        EngineSettings.load()
    assert str(caught.value).startswith(f"KVGATE_ENGINE_{variable}={value!r}: ")
    assert why in str(caught.value)


def test_an_unknown_setting_is_named_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_CPU_THREDS", "2")
    with pytest.raises(SettingsError, match=r"KVGATE_ENGINE_CPU_THREDS: unknown setting.*KVGATE_ENGINE_CPU_THREADS"):
        EngineSettings.load()
