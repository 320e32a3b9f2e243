"""Install kvgate and all it needs into ``.venv``: the CPU build of PyTorch where there is no NVIDIA GPU.

Runs before anything is installed, so it needs the standard library alone. It installs uv with pip and everything else
with uv, which is ten times as quick. uv doesn't read pip's settings, so index, mirror and certificate settings are
handed on. When nothing changed since the last run, it does nothing. Every failure is one message and exit code 1.
"""

import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
CPU_DISK_BYTES = 4 * 10**9
GPU_DISK_BYTES = 16 * 10**9
STEP_LIMIT_S = 3600.0
SHOWN_LINES = 15
COMPILED = "--compile-bytecode"
"""To bytecode once, here, rather than in each of the five processes of the first start."""

_NO_NETWORK = re.compile(
    r"name resolution|failed to establish a new connection|dns error|error sending request|failed to fetch|"
    r"connection (refused|reset|timed out)|network is unreachable|read timed out|tunnel connection failed",
    re.IGNORECASE,
)
_NO_DISK = re.compile(r"no space left on device|os error 28|disk quota exceeded", re.IGNORECASE)


class InstallError(Exception):
    """The installation can't go on; the message says why and what to do."""


def main() -> int:
    """Install what is missing; return the process's exit code."""
    started_s = time.monotonic()
    try:
        install(ROOT, started_s)
    except InstallError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def install(root: Path, started_s: float) -> None:
    """Bring ``root/.venv`` up to date. Raises ``InstallError``."""
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(f"kvgate needs Python 3.11 or newer; this is {platform.python_version()}")
    environment = root / ".venv"
    gpu = has_nvidia_gpu()
    stamp = environment / "kvgate-setup.json"
    wanted = fingerprint(root, gpu=gpu)
    if is_current(stamp, wanted) and (environment / "bin" / "kvgate").exists():
        return
    need_disk(root, GPU_DISK_BYTES if gpu else CPU_DISK_BYTES)
    kind = "with CUDA" if gpu else "for CPU"
    say(f"Installing kvgate into {environment} ({kind}, Python {platform.python_version()})")
    stamp.unlink(missing_ok=True)
    make_environment(environment)
    python = environment / "bin" / "python"
    settings = uv_settings(pip_settings(python))
    with step("uv, the installer"):
        run([python, "-m", "pip", "install", "--quiet", "uv>=0.7"])
    uv = [str(environment / "bin" / "uv"), "pip", "install", "--python", str(python)]
    if gpu:
        install_with_cuda(root, uv, settings)
    else:
        install_for_cpu(root, python, uv, settings)
    with step("kvgate itself"):
        run([*uv, "--no-deps", "--editable", str(root)], settings)
    stamp.write_text(json.dumps(wanted))
    say(f"Installed in {time.monotonic() - started_s:.0f} s.")


def install_for_cpu(root: Path, python: Path, uv: Sequence[str], settings: Mapping[str, str]) -> None:
    """Install the CPU build of torch, then the pinned set, which was resolved without what only CUDA needs."""
    pins = root / "requirements" / "cpu.txt"
    torch = pinned(pins, "torch")
    with step(f"{torch} for CPU (about 200 MB; the longest step)"):
        if not torch_is_installed(python, torch):
            if delivers_cpu_build(python, torch):
                run([python, "-m", "pip", "install", "--quiet", "--no-deps", torch])
            else:
                run([*uv, "--no-deps", "--torch-backend=cpu", torch], settings, hint=_torch_hint(torch))
    with step("LMDeploy and the other pinned packages (about 200 MB)"):
        run([*uv, COMPILED, "--no-deps", "--requirements", str(pins)], settings)


def install_with_cuda(root: Path, uv: Sequence[str], settings: Mapping[str, str]) -> None:
    """Install LMDeploy with its own requirements: its release decides the builds of torch and the kernels."""
    lmdeploy = pinned(root / "requirements" / "cpu.txt", "lmdeploy")
    with step(f"{lmdeploy} with CUDA and all it needs (several GB; the longest step)"):
        run([*uv, COMPILED, lmdeploy, f"{root}[engine,cuda,dev]"], settings)


def _torch_hint(torch: str) -> str:
    return (
        f"No CPU build of {torch} could be had: neither pip's configured sources nor PyTorch's own CPU index offer it. "
        "Download the wheel where there is a network and name its folder: PIP_FIND_LINKS=/that/folder make setup"
    )


def make_environment(environment: Path) -> None:
    """Create the virtual environment, or replace one whose Python no longer runs or is another version."""
    python = environment / "bin" / "python"
    if python.exists() and _version_of(python) == platform.python_version():
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise InstallError(
            f"{sys.executable} can't make virtual environments: its venv module is incomplete. "
            "On Debian and Ubuntu: apt-get install python3-venv"
        )
    with step("virtual environment"):
        try:
            venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(environment)
        except (OSError, subprocess.CalledProcessError) as error:
            raise InstallError(f"can't make the virtual environment {environment}: {error}") from error


def _version_of(python: Path) -> str | None:
    code = "import platform; print(platform.python_version())"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver answers and lists at least one GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout


def fingerprint(root: Path, *, gpu: bool) -> dict[str, str]:
    """Return what the installation depends on; equal fingerprints mean that there is nothing to do."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "requirements/cpu.txt", "scripts/install.py"):
        digest.update((root / name).read_bytes())
    return {
        "inputs": digest.hexdigest(),
        "python": platform.python_version(),
        "backend": "cuda" if gpu else "cpu",
        "root": str(root),
    }


def is_current(stamp: Path, wanted: Mapping[str, str]) -> bool:
    """Whether the last installation was finished and is the wanted one."""
    try:
        return bool(json.loads(stamp.read_text()) == wanted)
    except (OSError, ValueError):
        return False


def need_disk(folder: Path, needed_bytes: int) -> None:
    """Raise ``InstallError`` unless ``folder``'s disk has room, before an hour of downloads."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise InstallError(
            f"{folder} has {free_bytes / 1e9:.1f} GB free, setup needs {needed_bytes / 1e9:.0f} GB: free some"
        )


def pinned(requirements: Path, name: str) -> str:
    """Return the line ``name==version`` of a pinned set."""
    for line in requirements.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.split(" ", 1)[0]
    raise InstallError(f"{requirements} doesn't pin {name}; make it anew with: make lock")


def pip_settings(python: Path) -> dict[str, str]:
    """Return pip's settings from its files and environment, the environment last: it wins."""
    scopes: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in run([python, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        scope, _, name = key.strip().rpartition(".")
        if scope in scopes:
            scopes[scope][name] = str(ast.literal_eval(value.strip()))
    return scopes["global"] | scopes["install"] | scopes[":env:"]


def uv_settings(pip: Mapping[str, str]) -> dict[str, str]:
    """Return uv's environment variables that say what pip's settings say; the user's own uv variables win."""
    told = {
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(pip.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "SSL_CERT_FILE": pip.get("cert", ""),
        "ALL_PROXY": pip.get("proxy", ""),
        # pip takes the best version of all indexes; uv's default stops at the first index that knows the name.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_TIMEOUT": pip.get("default-timeout", pip.get("timeout", "")),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    return {name: value for name, value in told.items() if value and name not in os.environ}


def torch_is_installed(python: Path, torch: str) -> bool:
    """Whether the environment has this version of torch, in a build for CPU."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    version, _, build = answer.stdout.strip().partition("+")
    return f"torch=={version}" == torch and (build == "cpu" or not needs_cpu_index())


def needs_cpu_index() -> bool:
    """Whether PyPI's torch for this machine is a CUDA build: so on Linux on x86-64, elsewhere it is a CPU build."""
    return sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}


def delivers_cpu_build(python: Path, torch: str) -> bool:
    """Ask pip, without downloading, whether its configured sources would give a CPU build of ``torch``."""
    if not needs_cpu_index():
        return True
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        ask = [str(python), "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--ignore-installed"]
        try:
            subprocess.run(
                [*ask, "--report", str(report), torch], capture_output=True, timeout=STEP_LIMIT_S, check=True
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False  # what pip can't reach, uv may: it knows PyTorch's own index
        chosen = json.loads(report.read_text())["install"]
    return any(package["metadata"]["version"].endswith("+cpu") for package in chosen)


def run(command: Sequence[str | Path], settings: Mapping[str, str] | None = None, hint: str = "") -> str:
    """Run an installer quietly and return its output. Raises ``InstallError`` with its last lines and what to do."""
    # Outside the project, as uv would apply pyproject.toml's overrides, which are for the pinned set only.
    try:
        done = subprocess.run(
            command,
            cwd=tempfile.gettempdir(),
            env={**os.environ, **(settings or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"took more than {STEP_LIMIT_S:.0f} s: {' '.join(map(str, command))}") from error
    if done.returncode:
        raise InstallError(explain(command, done.stdout, hint))
    return done.stdout


def explain(command: Sequence[str | Path], output: str, hint: str) -> str:
    """Say in a few lines why an installer failed and what to do."""
    if _NO_DISK.search(output):
        advice = "The disk is full: free some space and run it again."
    elif hint:
        advice = hint
    elif _NO_NETWORK.search(output):
        advice = (
            "The package index can't be reached. Check the network; behind a proxy set HTTPS_PROXY; "
            "for a mirror set PIP_INDEX_URL. Then run it again: what is installed is kept."
        )
    else:
        advice = "Run it again after mending that: what is installed is kept."
    lines = output.strip().splitlines()[-SHOWN_LINES:]
    shown = "\n".join(f"    {line}" for line in lines)
    return f"this failed: {' '.join(map(str, command))}\n{shown}\n{advice}"


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show one line for a long step: what it is at its start, and at its end how long it took."""
    started_s = time.monotonic()
    print(f"  {what} ...", end=" ", flush=True)
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started_s:.0f} s", flush=True)


def say(line: str) -> None:
    """Print one line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
