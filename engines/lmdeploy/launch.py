"""One LMDeploy instance: LMDeploy's own command line with kvgate's hooks in place.

    python -m engines.lmdeploy.launch serve api_server MODEL --backend pytorch --server-port 9001

LMDeploy runs its engine in a *spawned* child process, which executes this module's top level again (as
``__mp_main__``) before anything else. So whatever must be hooked is hooked there, in both processes. On a machine with
CUDA nothing of the CPU back end is touched.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.lmdeploy.attention import flash3
from engines.lmdeploy.compat import IncompatibleEngineError, require_known_good
from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.lifeline import follow_parent
from engines.lmdeploy.patching import HookMismatchError, install
from engines.lmdeploy.settings import EngineSettings, SettingsError, collector_of


class LaunchError(RuntimeError):
    """The instance can't be started; the message says why in one line."""


def prepare(*, serving: bool) -> None:
    """Install every hook that this process needs; ``serving`` is for the one that answers HTTP.

    Raises before anything is changed.
    """
    require_known_good()
    settings = EngineSettings.load()
    import torch

    if not torch.cuda.is_available():
        from engines.lmdeploy.cpu import activate

        activate(_resources(settings))
        # OpenMP reads it when the engine process starts. Its workers would spin between two operators for as long as an
        # operator takes; with anything else on the cores that costs several times what it saves.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from engines.lmdeploy.hooks import (
        admission_hooks,
        attention_hooks,
        event_hooks,
        eviction_hooks,
        host_hooks,
        interruption_hooks,
        key_hooks,
        lifeline_hooks,
        pd_hooks,
        prompt_hooks,
        schedule_hooks,
        server_hooks,
        span_hooks,
        step_hooks,
        tenant_hooks,
        tier_hooks,
        usage_hooks,
    )

    hooks = [
        *lifeline_hooks(),
        *event_hooks(),
        *interruption_hooks(),
        *eviction_hooks(),
        *key_hooks(),
        *host_hooks(),
        *tenant_hooks(),
        *schedule_hooks(),
        *step_hooks(),
        *tier_hooks(),
        *admission_hooks(),
        *pd_hooks(),
        *usage_hooks(),
    ]
    if serving:
        hooks += [*server_hooks(), *prompt_hooks()]
        if collector_of(settings) is not None:
            hooks += span_hooks()
    if torch.cuda.is_available():
        flash3.provide()
        hooks += attention_hooks()
    install(hooks)


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the arguments, install the hooks and run LMDeploy's command line.

    Raises ``LaunchError`` for what can be known to fail before LMDeploy is imported.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:2] == ["serve", "api_server"]:
        _check_server(arguments[2:])
    prepare(serving=True)
    from lmdeploy.cli.entrypoint import run

    sys.argv = ["kvgate-engine", *arguments]
    run()


def _resources(settings: EngineSettings) -> CpuResources:
    here = CpuResources.of_this_machine()
    return CpuResources(
        threads=settings.cpu_threads or here.threads,
        kv_bytes=settings.cpu_kv_bytes or here.kv_bytes,
    )


def _check_server(arguments: Sequence[str]) -> None:
    """Find out about a missing model folder or a taken port now, not after a minute of loading."""
    model = next((each for each in arguments if not each.startswith("-")), None)
    if model is not None and model.startswith(("/", ".")) and not Path(model).is_dir():
        raise LaunchError(f"unknown model folder {model}")
    host = _option(arguments, "--server-name", "0.0.0.0")  # noqa: S104 - LMDeploy's default
    port = _option(arguments, "--server-port", "23333")
    if not port.isdecimal():
        return  # LMDeploy's parser says what is wrong with it
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            raise LaunchError(f"can't listen on {host}:{port}: {error}") from error


def _option(arguments: Sequence[str], name: str, default: str) -> str:
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return default


if __name__ in {"__main__", "__mp_main__"}:
    try:
        if __name__ == "__mp_main__":
            follow_parent()
            prepare(serving=False)
        else:
            main()
    except (LaunchError, SettingsError, IncompatibleEngineError, HookMismatchError) as refusal:
        sys.exit(f"kvgate engine: {refusal}")
