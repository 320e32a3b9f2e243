import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from gateway.settings import setting_fields
from kvcontrol.core.quantisation import KVQuantisation
from kvcontrol.presets import Presets
from kvgate.engine.instance import GATEWAY_SECRETS, EngineLimits, Instance
from kvgate.engine.model import Model
from kvgate.engine.presets import with_preset
from kvgate.engine.tiers import TierOptions
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu, core_count
from kvgate.up.announce import does
from kvgate.up.api_keys import ApiKey
from kvgate.up.stack import (
    LEAST_KV_BYTES,
    MOST_KV_BYTES,
    PORTS_PER_INSTANCE,
    TINY_KV_BLOCKS,
    TINY_KV_BYTES,
    GatewayOptions,
    Routing,
    engine_specs,
    gateway_spec,
    need_keys_beyond_loopback,
    need_sane_count,
    plan_instances,
    with_fair_threads,
)

MODEL = Model(folder=Path("/models/m"), name="m")
TINY = Model(folder=Path("/models/tiny"), name="tiny", is_tiny=True)
GPUS = [Gpu(selector="0", name="H100"), Gpu(selector="1", name="H100")]
SOCKETS = Path("/tmp/s")
PRESET = Presets.shipped().preset("long-context-64k", "nvidia-h100")


def ports(count: int) -> range:
    """What ``count`` instances take."""
    return range(20000, 20000 + PORTS_PER_INSTANCE * count)


def options(host: str = "127.0.0.1", keys: tuple[ApiKey, ...] = ()) -> GatewayOptions:
    return GatewayOptions(host=host, port=8000, api_keys=keys, routing=Routing.COST_AWARE, state_dir=Path("/state"))


def after(command: tuple[str, ...], option: str) -> str:
    return command[command.index(option) + 1]


def test_every_instance_has_ports_and_a_socket_of_its_own() -> None:
    instances = plan_instances(MODEL, ports(4), [], EngineLimits(), SOCKETS)
    taken = [port for each in instances for port in (each.port, each.events_port, each.replay_port)]
    assert sorted(taken) == list(ports(4))
    assert len({each.control_endpoint for each in instances}) == 4


@pytest.mark.parametrize("count", [0, -1, 65])
def test_an_odd_number_of_instances_is_refused(count: int) -> None:
    with pytest.raises(CommandError, match=f"--instances is {count}; allowed: 1 to 64"):
        need_sane_count(count)


def test_gpus_are_dealt_round_robin_and_those_on_one_share_its_memory() -> None:
    instances = plan_instances(MODEL, ports(3), GPUS, EngineLimits(), SOCKETS)
    assert [each.environment({})["CUDA_VISIBLE_DEVICES"] for each in instances] == ["0", "1", "0"]
    assert {after(each.command(), "--cache-max-entry-count") for each in instances} == {"0.4"}
    assert {after(each.command(), "--cache-block-seq-len") for each in instances} == {"64"}


def test_a_tiny_model_on_a_gpu_gets_a_fixed_number_of_blocks_unless_told_otherwise() -> None:
    tiny = plan_instances(TINY, ports(1), GPUS, EngineLimits(), SOCKETS)[0]
    assert after(tiny.command(), "--num-gpu-blocks") == str(TINY_KV_BLOCKS)
    fetched = plan_instances(TINY, ports(1), GPUS, EngineLimits(kv_share=0.1), SOCKETS)[0]
    assert after(fetched.command(), "--cache-max-entry-count") == "0.1"
    assert "--num-gpu-blocks" not in fetched.command()


def test_without_a_gpu_none_is_visible_and_blocks_are_small() -> None:
    instance = plan_instances(MODEL, ports(1), [], EngineLimits(), SOCKETS)[0]
    assert instance.environment({"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""
    assert after(instance.command(), "--cache-block-seq-len") == "16"
    assert "--enable-prefix-caching" in instance.command()


def test_cpu_memory_is_shared_out_within_bounds() -> None:
    limits = plan_instances(MODEL, ports(2), [], EngineLimits(), SOCKETS)[0].limits
    assert limits.kv_bytes is not None
    assert LEAST_KV_BYTES <= limits.kv_bytes <= MOST_KV_BYTES
    assert plan_instances(TINY, ports(2), [], EngineLimits(), SOCKETS)[0].limits.kv_bytes == TINY_KV_BYTES


def test_what_the_user_says_about_memory_is_what_the_engine_is_told() -> None:
    by_bytes = plan_instances(MODEL, ports(1), [], EngineLimits(kv_bytes=800), SOCKETS)[0]
    fetched = int(by_bytes.environment({})["KVGATE_ENGINE_CPU_KV_BYTES"])
    assert fetched * float(after(by_bytes.command(), "--cache-max-entry-count")) == 800
    by_blocks = plan_instances(MODEL, ports(1), [], EngineLimits(kv_blocks=99), SOCKETS)[0]
    assert after(by_blocks.command(), "--num-gpu-blocks") == "99"
    assert "KVGATE_ENGINE_CPU_KV_BYTES" not in by_blocks.environment({})


def test_engines_on_a_cpu_share_its_cores_unless_told_otherwise() -> None:
    def threads(count: int, limits: EngineLimits, base: dict[str, str]) -> str | None:
        instance = plan_instances(MODEL, ports(count), [], with_fair_threads(limits, count, base), SOCKETS)[0]
        return instance.environment(base).get("KVGATE_ENGINE_CPU_THREADS")

    assert threads(1, EngineLimits(), {}) == str(core_count())
    assert threads(64, EngineLimits(), {}) == str(max(1, core_count() // 64))
    assert threads(2, EngineLimits(cpu_threads=7), {}) == "7"
    assert threads(2, EngineLimits(), {"KVGATE_ENGINE_CPU_THREADS": "5"}) == "5"


def test_the_itl_target_is_what_the_engine_is_told() -> None:
    def fetched(limits: EngineLimits) -> str | None:
        return (
            plan_instances(MODEL, ports(1), [], limits, SOCKETS)[0].environment({}).get("KVGATE_ENGINE_ITL_TARGET_MS")
        )

    assert fetched(EngineLimits(itl_target_ms=42.5)) == "42.5"
    assert fetched(EngineLimits(itl_target_ms=0)) == "0"
    assert fetched(EngineLimits()) is None


def test_an_amount_on_a_gpu_and_a_share_on_a_cpu_are_refused() -> None:
    with pytest.raises(CommandError, match="on a GPU is a share"):
        plan_instances(MODEL, ports(1), GPUS, EngineLimits(kv_bytes=1), SOCKETS)
    with pytest.raises(CommandError, match="on a CPU is an amount"):
        plan_instances(MODEL, ports(1), [], EngineLimits(kv_share=0.5), SOCKETS)


def test_more_memory_than_the_machine_has_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        CommandError, match=r"asks for .* GiB \(2 engines\), and .* GiB of this machine's memory are free"
    ):
        plan_instances(TINY, ports(2), [], EngineLimits(kv_bytes=1 << 50), SOCKETS)


def test_lmdeploys_own_parser_takes_the_command_line(tmp_path: Path) -> None:
    limits = EngineLimits(
        block_tokens=32, kv_blocks=99, kv_share=0.5, max_batch_size=7, context_tokens=512, cpu_threads=1
    )
    instance = Instance(
        model=Model(folder=tmp_path / "m", name="m"),
        port=1,
        events_port=2,
        replay_port=3,
        control_endpoint="ipc:///s",
        gpu=GPUS[0],
        limits=limits,
    )
    arguments = instance.command()[3:]
    code = (
        "import sys; from lmdeploy.cli.entrypoint import CLI\n"
        "from lmdeploy.cli.serve import SubCliServe\n"
        "SubCliServe.add_parsers()\n"
        "a = CLI.parser.parse_args(sys.argv[1:])\n"
        "print(a.model_path, a.server_name, a.server_port, a.model_name, a.backend, a.cache_block_seq_len,\n"
        "      a.num_gpu_blocks, a.cache_max_entry_count, a.max_batch_size, a.session_len, a.enable_prefix_caching)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.split() == f"{tmp_path}/m 127.0.0.1 1 m pytorch 32 99 0.5 7 512 True".split(), done.stderr


def test_options_for_lmdeploy_come_last_so_that_they_win() -> None:
    instance = Instance(
        model=MODEL,
        port=1,
        events_port=2,
        replay_port=3,
        control_endpoint="ipc:///s",
        gpu=None,
        extra=("--log-level", "INFO"),
    )
    assert instance.command()[-2:] == ("--log-level", "INFO")


def test_engines_never_see_a_secret_of_the_gateway() -> None:
    secrets = {f"KVGATE_{name.upper()}" for name, each in setting_fields().items() if SecretStr in flat(each)}
    assert secrets | {"KVGATE_API_KEYS"} == GATEWAY_SECRETS
    base = dict.fromkeys(GATEWAY_SECRETS, "secret") | {"PATH": "/"}
    specs = engine_specs(plan_instances(MODEL, ports(1), [], EngineLimits(), SOCKETS), base)
    assert "secret" not in specs[0].environment.values()
    assert specs[0].environment["PATH"] == "/"


def test_compiled_kernels_are_kept_in_the_cache_folder_unless_the_environment_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVGATE_CACHE_DIR", "/cache")
    base = {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}
    [spec] = engine_specs(plan_instances(MODEL, ports(1), [], EngineLimits(), SOCKETS), base)
    assert spec.environment["TRITON_CACHE_DIR"] == "/cache/kernels/triton"
    assert spec.environment["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_what_an_instance_does_is_shown_with_how_long_it_compiled() -> None:
    [instance] = plan_instances(MODEL, ports(1), [], EngineLimits(), SOCKETS)
    assert does(instance, 3.25) == "tiers: none   warm-up: 3.2 s"
    assert does(instance, None) == "tiers: none"


def flat(field: FieldInfo) -> tuple[object, ...]:
    """What a setting's type is, or may be."""
    return (field.annotation, *get_args(field.annotation))


def test_the_gateway_is_told_of_every_instance_and_key() -> None:
    instances = plan_instances(MODEL, ports(2), [], EngineLimits(), SOCKETS)
    spec = gateway_spec(options(keys=(ApiKey(key="sk-1", tenant="acme"),)), instances, {})
    assert json.loads(spec.environment["KVGATE_INSTANCES"]) == [
        {"id": "engine-0", "url": instances[0].url},
        {"id": "engine-1", "url": instances[1].url},
    ]
    assert json.loads(spec.environment["KVGATE_API_KEYS"]) == [{"key": "sk-1", "tenant": "acme"}]
    assert spec.environment["KVGATE_TOKENIZER"] == "/models/m"
    assert spec.ready_url == "http://127.0.0.1:8000/readyz"


def test_the_gateways_own_settings_take_what_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gateway.settings import load_settings

    model = Model(folder=tmp_path, name="m")
    instances = plan_instances(model, ports(2), [], EngineLimits(), SOCKETS)
    spec = gateway_spec(options(keys=(ApiKey(key="sk-1", tenant="acme"),)), instances, {})
    for name, value in spec.environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert [instance.id for instance in settings.fleet.instances] == ["engine-0", "engine-1"]
    assert settings.access.api_keys[0].tenant == "acme"
    assert settings.routing.routing_policy == "cost_aware"
    assert settings.server.port == 8000


def test_a_gateway_for_the_network_needs_a_key() -> None:
    with pytest.raises(CommandError, match=r"--host 0\.0\.0\.0 is reachable from other machines"):
        need_keys_beyond_loopback(options("0.0.0.0"))  # noqa: S104
    need_keys_beyond_loopback(options("0.0.0.0", (ApiKey(key="k", tenant="t"),)))  # noqa: S104
    need_keys_beyond_loopback(options("::1"))


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000")])  # noqa: S104
def test_where_this_machine_reaches_a_gateway_that_listens_everywhere(host: str, url: str) -> None:
    assert options(host).url == url


def test_api_keys_as_people_type_them() -> None:
    assert ApiKey.parse("sk-1") == ApiKey(key="sk-1", tenant="default")
    assert ApiKey.parse("acme:sk-1") == ApiKey(key="sk-1", tenant="acme")
    for bad in ("", ":", "acme:", ":sk-1", " "):
        with pytest.raises(CommandError, match="--api-key is empty"):
            ApiKey.parse(bad)


def test_each_instance_keeps_its_tiers_in_files_of_its_own() -> None:
    tiers = TierOptions(ddr_bytes=1 << 30, ddr_path=Path("/dev/shm/kv"), nvme_dir=Path("/data/kv"), nvme_bytes=1 << 31)
    planned = plan_instances(MODEL, ports(2), [], EngineLimits(kv_bytes=1 << 20, tiers=tiers), SOCKETS)
    fetched = [each.environment({}) for each in planned]
    assert [each["KVGATE_ENGINE_DDR_PATH"] for each in fetched] == ["/dev/shm/kv-0", "/dev/shm/kv-1"]
    assert [each["KVGATE_ENGINE_NVME_PATH"] for each in fetched] == ["/data/kv/engine-0", "/data/kv/engine-1"]
    assert [each["KVGATE_ENGINE_DDR_BYTES"] for each in fetched] == [str(1 << 30)] * 2


def test_an_instance_without_tiers_is_told_of_none() -> None:
    planned = plan_instances(MODEL, ports(1), [], EngineLimits(kv_bytes=1 << 20), SOCKETS)
    assert not any("DDR" in name or "NVME" in name for name in planned[0].environment({}))


def test_what_a_preset_sets_becomes_options_of_lmdeploy() -> None:
    limits = with_preset(EngineLimits(), PRESET, MODEL, 1)
    command = plan_instances(MODEL, ports(1), GPUS, limits, SOCKETS)[0].command()
    assert after(command, "--max-prefill-token-num") == "8192"
    assert after(command, "--piecewise-cudagraph-max-tokens") == "2048"
    assert after(command, "--quant-policy") == "none"
    assert after(command, "--cache-max-entry-count") == "0.8"
    assert after(command, "--session-len") == "65536"


def test_what_a_preset_sets_is_what_lmdeploys_own_parser_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.cli.serve import SubCliServe

    monkeypatch.setattr(SubCliServe, "subparsers", argparse.ArgumentParser().add_subparsers())
    SubCliServe.add_parser_api_server()
    parser = SubCliServe.subparsers.choices["api_server"]
    shipped = Presets.shipped()
    for quantisation in KVQuantisation:
        for name in shipped.workloads:
            limits = replace(
                with_preset(EngineLimits(), shipped.preset(name, "nvidia-h100"), MODEL, 1), kv_quantisation=quantisation
            )
            command = plan_instances(MODEL, ports(1), GPUS, limits, SOCKETS)[0].command()
            parsed = parser.parse_args(command[command.index("api_server") + 1 :])
            assert parsed.session_len == limits.context_tokens
            assert parsed.piecewise_cudagraph_max_tokens == 2048
