"""What this machine can run engines on."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum

from kvgate.failure import CommandError

_TOOL_LIMIT_S = 60.0
_GPU_LINE = re.compile(r"^GPU (\d+): (.+?) \(UUID: (.+)\)$")


class Device(StrEnum):
    """Where engines compute. ``AUTO`` is the GPUs where there are any that torch can use, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One visible GPU; ``selector`` is what CUDA_VISIBLE_DEVICES calls it."""

    selector: str
    name: str


def gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible, in that order.

    Empty where there is no driver. Doesn't import torch, which takes seconds.
    """
    listed: dict[str, Gpu] = {}
    for line in _nvidia_smi("-L").splitlines():
        if found := _GPU_LINE.match(line.strip()):
            index, name, uuid = found.groups()
            listed[index] = Gpu(selector=index, name=name)
            listed[uuid] = Gpu(selector=uuid, name=name)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for key, gpu in listed.items() if key.isdigit()]
    chosen = []
    for selector in (part.strip() for part in visible.split(",")):
        if selector not in listed:  # CUDA ends its list at the first one that it doesn't know
            break
        chosen.append(listed[selector])
    return chosen


def gpu_memory_bytes(gpu: Gpu) -> int | None:
    """Return how much memory a GPU has in all, None where nvidia-smi doesn't tell."""
    answer = _nvidia_smi(f"--id={gpu.selector}", "--query-gpu=memory.total", "--format=csv,noheader,nounits").strip()
    return int(answer) << 20 if answer.isdecimal() else None


def gpu_compute_capability(gpu: Gpu) -> float | None:
    """Return a GPU's compute capability, as 9.0, None where nvidia-smi doesn't tell."""
    answer = _nvidia_smi(f"--id={gpu.selector}", "--query-gpu=compute_cap", "--format=csv,noheader").strip()
    try:
        return float(answer)
    except ValueError:
        return None


def torch_version() -> str | None:
    """Return the installed torch's version with its build (``2.13.0+cpu``), None when it isn't installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def choose_gpus(device: Device) -> list[Gpu]:
    """Return the GPUs to use, none for the CPU. Raises ``CommandError`` when ``device`` is CUDA and can't be had."""
    if device is Device.CPU:
        return []
    found = gpus()
    build = torch_version() or "not installed"
    if found and not build.endswith("+cpu"):
        return found
    if device is Device.CUDA and not found:
        raise CommandError(
            "--device cuda: no GPU is visible (nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them)",
            "check the driver with nvidia-smi, or use --device cpu",
        )
    if found:
        message = f"this machine has {len(found)} GPU(s), but torch is {build}, the CPU build"
        raise CommandError(message, "install the CUDA build with make clean setup, or use --device cpu")
    return []


def core_count() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Return the main memory that can be used without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def _nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
