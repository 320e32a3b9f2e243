"""Settings out of the environment: defaults that work, errors that name variable, value and what is allowed."""

import pytest

from engines.lmdeploy.settings import EngineSettings, SettingsError
from kvcontrol.core.watermarks import Watermarks


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
        ("HBM_POLICY", "best", "unknown policy 'best'; known: lru"),
        ("DDR_POLICY", "mq(lifetime=0)", "lifetime is 0; allowed is a number from 0.01"),
        ("SHADOW_POLICIES", "lru,lru", "policy lru is named twice"),
        ("EVENTS_PENDING_BLOCKS", "-1", "greater than or equal to 1"),
        ("PACE", "best", "unknown pace 'best'; known: lmdeploy, alternate, itl_target"),
        ("ITL_TARGET_MS", "-1", "greater than or equal to 0"),
        ("ITL_TARGET_MS", "0.5", "itl_target_ms is 0.5; allowed is a number from 1 to 60000"),
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


def test_watermarks_are_all_of_a_tier_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineSettings.load().ddr_watermarks == Watermarks(high=1.0, low=1.0)
    monkeypatch.setenv("KVGATE_ENGINE_DDR_HIGH_WATERMARK", "0.8")
    assert EngineSettings.load().ddr_watermarks == Watermarks(high=0.8, low=0.8)
    monkeypatch.setenv("KVGATE_ENGINE_DDR_LOW_WATERMARK", "0.7")
    assert EngineSettings.load().ddr_watermarks == Watermarks(high=0.8, low=0.7)


def test_write_back_has_a_watermark_to_begin_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_WRITE_MODE", "write_back")
    assert EngineSettings.load().ddr_watermarks == Watermarks(high=0.95, low=0.9)
    monkeypatch.setenv("KVGATE_ENGINE_DDR_HIGH_WATERMARK", "1")
    with pytest.raises(SettingsError, match="write_back needs ddr_high_watermark below 1"):
        EngineSettings.load()


def test_watermarks_out_of_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_NVME_HIGH_WATERMARK", "0.5")
    monkeypatch.setenv("KVGATE_ENGINE_NVME_LOW_WATERMARK", "0.6")
    with pytest.raises(SettingsError, match=r"nvme_low_watermark is 0\.6; it must not be above the high one \(0\.5\)"):
        EngineSettings.load()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"NVME_PATH": "/d"}, "nvme_path and nvme_bytes go together"),
        ({"NVME_BYTES": "1000000", "DDR_BYTES": "1000000"}, "nvme_path and nvme_bytes go together"),
        ({"NVME_PATH": "/d", "NVME_BYTES": "1000000"}, "need ddr_bytes > 0"),
        ({"DDR_PATH": "/dev/shm/a"}, "need ddr_bytes > 0"),
        ({"DDR_BYTES": "-1"}, "KVGATE_ENGINE_DDR_BYTES='-1': Input should be greater than or equal to 0"),
        ({"WRITE_MODE": "never"}, "'write_through', 'write_back' or 'write_on_second_use'"),
        ({"TENANT_BURST_SHARE": "0"}, "KVGATE_ENGINE_TENANT_BURST_SHARE='0': Input should be greater than 0"),
        ({"TENANT_BURST_SHARE": "60%"}, "KVGATE_ENGINE_TENANT_BURST_SHARE='60%': Input should be a valid number"),
        ({"TENANT_GUARANTEED_SHARE": "0.1"}, "tenant_guaranteed_share and guaranteed_tenants go together"),
        ({"GUARANTEED_TENANTS": "shared"}, "tenant_guaranteed_share and guaranteed_tenants go together"),
        (
            {"GUARANTEED_TENANTS": "acme", "TENANT_GUARANTEED_SHARE": "0.1"},
            "guaranteed_tenants has 'acme'; allowed are shared and names of 16 hex digits",
        ),
        (
            {"GUARANTEED_TENANTS": "shared, shared", "TENANT_GUARANTEED_SHARE": "0.1"},
            "guaranteed_tenants names a tenant twice",
        ),
        (
            {"GUARANTEED_TENANTS": "shared,0123456789abcdef", "TENANT_GUARANTEED_SHARE": "0.51"},
            "2 guaranteed_tenants with a share of 0.51 each are more than a tier",
        ),
        (
            {"GUARANTEED_TENANTS": "shared", "TENANT_GUARANTEED_SHARE": "0.6", "TENANT_BURST_SHARE": "0.5"},
            "tenant_guaranteed_share is 0.6; it must not be above tenant_burst_share (0.5)",
        ),
        ({"LOAD_DEADLINE_S": "0"}, "KVGATE_ENGINE_LOAD_DEADLINE_S='0': Input should be greater than 0"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"KVGATE_ENGINE_{name}", value)
    with pytest.raises(SettingsError) as caught:
        EngineSettings.load()
    assert why in str(caught.value)
    assert "KVGATE_ENGINE_" in str(caught.value)
