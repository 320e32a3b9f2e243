"""``kvgate doctor``: whether this machine and installation can run kvgate, and what to do where not."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from kvcontrol.presets import Preset, Presets
from kvgate.boards import checking
from kvgate.display import plain, print_table, write_out
from kvgate.engine.extra import ENGINE_ADVICE
from kvgate.engine.finding import Finding, Verdict, is_fit
from kvgate.engine.fit import NOT_MEASURED, Machine, examine_preset, unmeasured_keys
from kvgate.engine.presets import choose_preset
from kvgate.engine.tier_flags import TierFlags, nvme_root_dir, tier_options
from kvgate.failure import CommandError
from kvgate.host.machine import Device, available_memory_bytes, choose_gpus, core_count, gpus, torch_version
from kvgate.host.paths import make_socket_dir, remove_socket_dir, state_dir
from kvgate.host.ports import LOOPBACK, need_free

LEAST_DISK_BYTES = 2 * 10**9
LEAST_MEMORY_BYTES = 4 * 10**9
OLDEST_PYTHON = (3, 11)
HOOKS_LIMIT_S = 300.0
_CHECK_ATTENTION = "from engines.lmdeploy.attention import flash3; print(flash3.provide())"
_CHECK_HOOKS = "import engines.lmdeploy.launch as launch; launch.prepare(serving=True)"


def doctor(  # noqa: PLR0913 - each is one option
    *,
    port: Annotated[int, typer.Option(help="Port for the gateway.")] = 8000,
    preset: Annotated[
        str | None, typer.Option(help="Compare this preset with the machine and list its values.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Hardware of the preset. Default: the visible GPU, else cpu.")
    ] = None,
    instances: Annotated[
        int, typer.Option(min=1, max=64, help="Number of engines with this preset on this machine.")
    ] = 1,
    nvme_dir: Annotated[
        Path | None, typer.Option(help="Folder of the preset's NVMe tier. Default: tiers in the cache folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Check this machine and installation. Exit code 1 when something would keep kvgate from running.

    With --preset, check which values of a preset fit this machine. Exit code 1 when a value doesn't.
    """
    if preset is not None:
        _examine_preset(preset, hardware, instances, nvme_dir, as_json=as_json)
    if hardware is not None or nvme_dir is not None:
        raise CommandError("--hardware and --nvme-dir need --preset", _preset_names())
    with checking() as begin:
        findings = examine(port, begin)
    if as_json:
        shipped = Presets.shipped()
        _write_json(findings, presets=list(shipped.workloads), hardware=list(shipped.hardware))
    else:
        print_table(_table(findings))
        plain(_preset_names())
    raise typer.Exit(0 if is_fit(findings) else 1)


def _examine_preset(
    name: str, hardware: str | None, instances: int, nvme_dir: Path | None, *, as_json: bool
) -> NoReturn:
    found = gpus()
    chosen = choose_preset(name, hardware, found)
    if nvme_dir is not None and chosen.nvme is None:
        raise CommandError(f"--nvme-dir: {name} has no NVMe tier")
    tiers = tier_options(TierFlags(nvme_dir=nvme_dir), chosen, "MODEL", nvme_root_dir())
    findings = examine_preset(chosen, tiers, Machine.here(found), instances)
    if as_json:
        _write_json(
            findings,
            preset=chosen.name,
            hardware=chosen.hardware,
            instances=instances,
            values=chosen.values(),
            not_measured=unmeasured_keys(chosen),
        )
    else:
        plain(f"{chosen.name} on {chosen.hardware}: {chosen.summary}\n")
        print_table(_values_table(chosen))
        plain("\nValues for one engine. Comparison with this machine:\n")
        print_table(_table([finding for finding in findings if finding.check != NOT_MEASURED]))
    raise typer.Exit(0 if is_fit(findings) else 1)


def _values_table(preset: Preset) -> Table:
    table = Table.grid(padding=(0, 2))
    unmeasured = unmeasured_keys(preset)
    for key, value in preset.values().items():
        marks = ("not measured" * (key in unmeasured), "of each tier, for one tenant" * key.startswith("quota."))
        mark = f"[dim]{', '.join(filter(None, marks))}[/]"
        table.add_row(key, escape("-" if value is None else str(value)), mark)
    return table


def _preset_names() -> str:
    shipped = Presets.shipped()
    return (
        f"presets: {', '.join(shipped.workloads)}\nhardware: {', '.join(shipped.hardware)}\n"
        "kvgate doctor --preset NAME compares a preset with this machine"
    )


def _write_json(findings: Sequence[Finding], **more: object) -> None:
    report = {"ok": is_fit(findings), **more, "checks": [asdict(finding) for finding in findings]}
    write_out(json.dumps(report, indent=2))


def examine(port: int, begin: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run every check, and call ``begin`` with its name before; a check that breaks is itself a finding."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": check_python,
        "torch": check_torch,
        "device": check_device,
        "lmdeploy": check_lmdeploy,
        **({"attention": check_attention} if gpus() else {}),
        "port": lambda: check_port(port),
        "sockets": check_sockets,
        "state": lambda: check_disk("state", state_dir()),
        "cache": check_cache,
        "memory": check_memory,
        "model": check_model,
    }
    findings = []
    for name, check in checks.items():
        begin(name)
        findings.append(check())
    return findings


def check_python() -> Finding:
    """Python is new enough."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Finding(check="python", verdict=Verdict.FAIL, found=version, advice="kvgate needs Python 3.11 or newer")
    return Finding(check="python", verdict=Verdict.OK, found=f"{version} ({sys.executable})")


def check_torch() -> Finding:
    """PyTorch is installed."""
    version = torch_version()
    if version is None:
        return Finding(check="torch", verdict=Verdict.FAIL, found="not installed", advice=ENGINE_ADVICE)
    return Finding(check="torch", verdict=Verdict.OK, found=version)


def check_device() -> Finding:
    """What engines would compute on."""
    try:
        chosen = choose_gpus(Device.AUTO)
    except CommandError as error:
        return Finding(check="device", verdict=Verdict.FAIL, found=error.message, advice=error.advice)
    if chosen:
        return Finding(check="device", verdict=Verdict.OK, found=", ".join(gpu.name for gpu in chosen))
    seen = f"CPU, {core_count()} cores"
    return Finding(check="device", verdict=Verdict.OK, found=seen + (" (GPUs unused)" if gpus() else ""))


def check_lmdeploy() -> Finding:
    """LMDeploy is a version known to be good and every hook fits, tried in a process of its own."""
    try:
        version = importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return Finding(check="lmdeploy", verdict=Verdict.FAIL, found="not installed", advice=ENGINE_ADVICE)
    try:
        tried = _run_python(_CHECK_HOOKS)
    except subprocess.TimeoutExpired:
        return Finding(check="lmdeploy", verdict=Verdict.FAIL, found=f"{version}: loading took {HOOKS_LIMIT_S:.0f} s")
    if tried.returncode:
        return Finding(
            check="lmdeploy",
            verdict=Verdict.FAIL,
            found=f"{version}: {_last_line(tried.stderr)}",
            advice=f"{ENGINE_ADVICE} installs the supported version",
        )
    return Finding(check="lmdeploy", verdict=Verdict.OK, found=f"{version}, all hooks match")


def check_attention() -> Finding:
    """Which kernels compute attention on this GPU, found out in a process of its own."""
    try:
        tried = _run_python(_CHECK_ATTENTION)
    except subprocess.TimeoutExpired:
        return Finding(check="attention", verdict=Verdict.WARN, found=f"loading took {HOOKS_LIMIT_S:.0f} s")
    if tried.returncode:
        return Finding(check="attention", verdict=Verdict.WARN, found=_last_line(tried.stderr))
    if importlib.util.find_spec("triton") is None:
        decode = "LMDeploy's kernel (Triton isn't installed)"
    else:
        decode = "kvgate's split kernel, if it agrees with LMDeploy's kernel at the start"
    return Finding(
        check="attention", verdict=Verdict.OK, found=f"prompts: {_last_line(tried.stdout)}; decode: {decode}"
    )


def _run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HOOKS_LIMIT_S,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines()[-1:] or ["no message"])[0]


def check_port(port: int) -> Finding:
    """The gateway's port is free."""
    try:
        need_free(LOOPBACK, port)
    except CommandError as error:
        return Finding(check="port", verdict=Verdict.WARN, found=error.message, advice=error.advice)
    return Finding(check="port", verdict=Verdict.OK, found=f"{port} is free")


def check_sockets() -> Finding:
    """A private folder for sockets can be made."""
    try:
        folder = make_socket_dir(os.getpid())
    except CommandError as error:
        return Finding(check="sockets", verdict=Verdict.FAIL, found=error.message, advice=error.advice)
    remove_socket_dir(folder)
    return Finding(check="sockets", verdict=Verdict.OK, found=str(folder.parent))


def check_disk(name: str, folder: Path) -> Finding:
    """A folder's disk has room and the folder can be written."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    found = f"{folder}, {free_bytes / 1e9:.0f} GB free"
    if not os.access(existing, os.W_OK):
        return Finding(
            check=name, verdict=Verdict.FAIL, found=f"{existing} is not writable", advice="choose another folder"
        )
    if free_bytes < LEAST_DISK_BYTES:
        return Finding(check=name, verdict=Verdict.WARN, found=found, advice="free disk space")
    return Finding(check=name, verdict=Verdict.OK, found=found)


def check_cache() -> Finding:
    """The folder for models."""
    from engines.models.cache import cache_dir

    return check_disk("cache", cache_dir())


def check_memory() -> Finding:
    """Main memory for two engines."""
    free_bytes = available_memory_bytes()
    found = f"{free_bytes / 1e9:.0f} GB available"
    if free_bytes < LEAST_MEMORY_BYTES:
        advice = "two engines with SmolLM2 take about 4 GB: use --instances 1 or --tiny"
        return Finding(check="memory", verdict=Verdict.WARN, found=found, advice=advice)
    return Finding(check="memory", verdict=Verdict.OK, found=found)


def check_model() -> Finding:
    """The embedded model is there whole."""
    from engines.models import smollm2
    from engines.models.cache import cache_dir, problem_of

    folder = cache_dir() / smollm2.NAME
    if not folder.exists():
        return Finding(
            check="model",
            verdict=Verdict.OK,
            found=f"{smollm2.NAME} is not downloaded yet; kvgate up downloads the model",
        )
    problem = problem_of(folder, smollm2.RECIPE)
    if problem is not None:
        return Finding(
            check="model",
            verdict=Verdict.WARN,
            found=f"{folder}: {problem}",
            advice="kvgate up prepares the model again",
        )
    return Finding(check="model", verdict=Verdict.OK, found=str(folder))


def _table(findings: Sequence[Finding]) -> Table:
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        colour = colours[finding.verdict]
        advice = f"\n[dim]->[/] {escape(finding.advice)}" if finding.advice else ""
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.check, escape(finding.found) + advice)
    return table
