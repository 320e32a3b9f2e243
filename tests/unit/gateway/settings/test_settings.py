import os
from pathlib import Path
from typing import Literal

import pytest

from gateway.errors import SettingsError
from gateway.settings import Settings, load_settings, setting_fields


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVGATE_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "kvgate.yaml"
    path.write_text(text)
    return path


def test_the_environment_goes_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "port: 9000\nlog_format: json\ninstances:\n- {id: a, url: 'http://127.0.0.1:1/'}\n")
    monkeypatch.setenv("KVGATE_PORT", "9001")
    settings = load_settings(path)
    assert (settings.server.port, settings.telemetry.log_format, settings.server.host) == (9001, "json", "127.0.0.1")
    assert settings.fleet.instances[0].url == "http://127.0.0.1:1"
    monkeypatch.setenv("KVGATE_INSTANCES", '[{"id": "b", "url": "http://127.0.0.1:2"}]')
    assert [each.id for each in load_settings(path).fleet.instances] == ["b"]


def test_what_commands_read_that_talk_to_a_gateway_is_no_setting_and_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVGATE_URL", "KVGATE_API_KEY"):
        monkeypatch.setenv(name, "http://127.0.0.1:8000")
    assert load_settings(write(tmp_path, "port: 9000")).server.port == 9000
    monkeypatch.setenv("KVGATE_URLS", "x")
    with pytest.raises(SettingsError, match="unknown setting KVGATE_URLS"):
        load_settings(write(tmp_path, "port: 9000"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1", ["kvgate.yaml", "prot", "did you mean port?"]),
        ("port: high", ["kvgate.yaml", "port", "'high'", "integer"]),
        ("port: 70000", ["kvgate.yaml", "port", "70000", "65535"]),
        ("routing_policy: best", ["kvgate.yaml", "routing_policy", "'best'", "round_robin"]),
        ("instances: [{id: a}]", ["kvgate.yaml", "instances.0.url"]),
        ("instances: [{id: a, url: 'http://h', role: x}]", ["instances.0.role", "'hybrid', 'prefill' or 'decode'"]),
        ("instances: [{id: a, url: ftp://h}]", ["instances.0.url", "ftp://h", "http://127.0.0.1:9001"]),
        ("instances: [{id: a, url: 'http://h:1'}, {id: a, url: 'http://h:2'}]", ["instance id", "once"]),
        ("host: 192.0.2.1", ["192.0.2.1", "loopback", "api_keys"]),
        ("salt_secret: short", ["salt_secret", "16"]),
        ("tokenizer: /nowhere", ["tokenizer", "/nowhere", "folder"]),
        ("- a list", ["kvgate.yaml", "list", "mapping"]),
        ("a: [", ["kvgate.yaml", "not YAML"]),
        ("port: 0x" + "f" * 5_000, ["kvgate.yaml", "not YAML", "more than 1024 bits"]),
        ("port: !!int high", ["kvgate.yaml", "not YAML", "invalid value"]),
    ],
)
def test_a_wrong_file_is_named_with_key_value_and_what_is_allowed(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(write(tmp_path, text))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("KVGATE_PORTS", "1", ["environment", "KVGATE_PORTS", "KVGATE_PORT?"]),
        ("KVGATE_PORT", "x", ["environment", "KVGATE_PORT", "'x'"]),
        ("KVGATE_INSTANCES", "[{", ["KVGATE_INSTANCES", "JSON"]),
        ("KVGATE_IDLE_TIMEOUT_S", "0", ["KVGATE_IDLE_TIMEOUT_S", "greater than 0"]),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, parts: list[str]) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as error:
        load_settings()
    for part in parts:
        assert part in str(error.value)


def test_secrets_never_stand_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_API_KEYS", '[{"key": "sk-hush", "tenant": "no spaces", "x": 1}]')
    monkeypatch.setenv("KVGATE_SALT_SECRET", "hush")
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert "hush" not in str(error.value)


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_ENGINE_CPU_THREADS", "2")
    monkeypatch.setenv("KVGATE_CACHE_DIR", "/somewhere")
    assert load_settings().server.port == 8000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_open_mode_listens_on_loopback_only_and_keys_open_the_rest(host: str) -> None:
    assert Settings(host=host).access.open_mode
    assert not Settings(host="192.0.2.1", api_keys=[{"key": "k", "tenant": "t"}]).access.open_mode  # type: ignore[arg-type]


def test_every_setting_is_described() -> None:
    assert [name for name, field in setting_fields().items() if not field.description] == []


@pytest.mark.parametrize(
    ("host", "access", "is_open"),
    [
        *((host, "auto", True) for host in ("127.0.0.1", "::1", "localhost")),
        *((host, "auto", False) for host in ("0.0.0.0", "::", "10.0.0.7", "gateway.example")),  # noqa: S104
        ("127.0.0.1", "key", False),
        ("0.0.0.0", "open", True),  # noqa: S104
    ],
)
def test_operators_data_is_shown_without_a_key_on_loopback_unless_told_otherwise(
    host: str, access: Literal["auto", "open", "key"], *, is_open: bool
) -> None:
    settings = Settings(host=host, operator_access=access, require_keys=True)
    assert settings.operators_open is is_open


@pytest.mark.parametrize("other", ["admin_key", "api_keys"])
def test_prometheus_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    key = "one-key-for-everything"
    monkeypatch.setenv("KVGATE_METRICS_KEY", key)
    monkeypatch.setenv(
        f"KVGATE_{other.upper()}", key if other == "admin_key" else f'[{{"key": "{key}", "tenant": "acme"}}]'
    )
    with pytest.raises(SettingsError, match="metrics_key is the admin_key or one of the api_keys") as failure:
        load_settings()
    assert key not in str(failure.value)


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "https://A.example", "https://a.example/x", "null", "https://", ""]
)
def test_what_is_no_origin_is_refused(monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    monkeypatch.setenv("KVGATE_CORS_ORIGINS", f'["{origin}"]')
    with pytest.raises(SettingsError, match="is not an origin"):
        load_settings()


def test_every_page_is_allowed_only_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_CORS_ORIGINS", '["*"]')
    with pytest.raises(SettingsError, match="any page that a browser on this machine shows"):
        load_settings()
    monkeypatch.setenv("KVGATE_REQUIRE_KEYS", "true")
    assert load_settings().access.cors_origins == ("*",)


def test_idle_connections_are_kept_for_longer_than_load_balancers_keep_them() -> None:
    assert Settings().server.keep_alive_timeout_s > 60


def test_wrong_values_of_several_sections_are_named_in_one_answer(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(write(tmp_path, "port: high\nqueue_length: -1\nbody_memory_bytes: 2048\n"))
    port, memory, queue = str(error.value).splitlines()
    assert "kvgate.yaml: port = 'high'" in port
    assert memory.startswith("settings: body_memory_bytes is at least 16 times max_body_bytes")
    assert "kvgate.yaml: queue_length = -1" in queue


def test_every_setting_belongs_to_one_section() -> None:
    sections = [field.annotation for field in Settings.model_fields.values()]
    names = [name for section in sections for name in section.model_fields]  # type: ignore[union-attr]
    assert sorted(names) == sorted(set(names)) == sorted(setting_fields())
