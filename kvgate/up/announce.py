"""What ``kvgate up`` prints when everything is ready."""

import json
from collections.abc import Sequence

from kvcontrol.core.roles import EngineRole
from kvgate.display import output, plain
from kvgate.engine.instance import Instance
from kvgate.engine.model import Model
from kvgate.up.stack import GatewayOptions

QUESTION = "What is the capital of France?"
_KEY_VARIABLE = "$KVGATE_API_KEY"


def curl(gateway: GatewayOptions, model: Model, *, stored_keys: bool = False) -> str:
    """Return a command line that asks the gateway something; it works as it is, in any POSIX shell, where
    ``KVGATE_API_KEY`` has the key if the gateway wants one that was not typed. ``stored_keys``: its keys are those that
    an earlier run stored.
    """
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    key = ""
    if gateway.api_keys and gateway.api_keys[0].shown:
        key = f" -H 'authorization: Bearer {gateway.api_keys[0].key}'"
    elif gateway.api_keys or stored_keys:
        key = f' -H "authorization: Bearer {_KEY_VARIABLE}"'
    data = json.dumps(body).replace("'", "'\\''")
    return f"curl -s {gateway.url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{data}'"


def does(instance: Instance, warm_up_s: float | None) -> str:
    """Return what is shown beside a started instance; ``warm_up_s`` is how long it compiled before it was ready."""
    parts = [f"role: {instance.role}"] if instance.role is not EngineRole.HYBRID else []
    if not parts or instance.shares_tiers:
        parts.append(f"tiers: {instance.limits.tiers}")
    if warm_up_s is not None:
        parts.append(f"warm-up: {warm_up_s:.1f} s")
    return "   ".join(parts)


def announce(
    instances: list[Instance],
    gateway: GatewayOptions,
    took_s: float,
    warm_ups: Sequence[float | None],
    *,
    stored_keys: bool,
) -> None:
    """Print where everything listens and a command line to paste."""
    model = instances[0].model
    output.print(f"\n[bold green]kvgate is ready[/] on {gateway.url}  ({took_s:.0f} s)\n", soft_wrap=True)
    plain(f"  {curl(gateway, model, stored_keys=stored_keys)}\n")
    if stored_keys or (gateway.api_keys and not gateway.api_keys[0].shown):
        plain("with one of your keys in KVGATE_API_KEY.\n")
    plain(f"Dashboard  {gateway.url}/dashboard")
    for index, (instance, warm_up_s) in enumerate(zip(instances, warm_ups, strict=True)):
        plain(f"engine-{index}   {instance.url}   {does(instance, warm_up_s)}")
    if not instances[0].limits.tiers.ddr_bytes and instances[0].role is EngineRole.HYBRID:
        plain("Evicted KV blocks are lost; --ddr or --preset keeps them in tiers.")
    if stored_keys:
        plain(f"Clients present a key that {gateway.state_dir} stores; kvgate admin keys list shows them.")
    elif not gateway.api_keys:
        plain("No API key is set: the gateway listens on loopback only and accepts any key.")
    if not model.talks_sense:
        plain("The tiny model has random weights: its answers are nonsense.")
    plain("Ctrl-C stops everything.")
