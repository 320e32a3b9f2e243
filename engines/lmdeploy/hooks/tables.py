"""Every table, for the contract tests."""

from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.hooks.admission import admission_hooks
from engines.lmdeploy.hooks.attention import attention_hooks
from engines.lmdeploy.hooks.cpu import cpu_hooks
from engines.lmdeploy.hooks.events import event_hooks
from engines.lmdeploy.hooks.eviction import eviction_hooks
from engines.lmdeploy.hooks.host import host_hooks, prompt_hooks
from engines.lmdeploy.hooks.interruptions import interruption_hooks
from engines.lmdeploy.hooks.keys import key_hooks
from engines.lmdeploy.hooks.lifeline import lifeline_hooks
from engines.lmdeploy.hooks.pd import pd_hooks
from engines.lmdeploy.hooks.schedule import schedule_hooks
from engines.lmdeploy.hooks.server import server_hooks
from engines.lmdeploy.hooks.spans import span_hooks
from engines.lmdeploy.hooks.steps import step_hooks
from engines.lmdeploy.hooks.tenancy import tenant_hooks
from engines.lmdeploy.hooks.tiers import tier_hooks
from engines.lmdeploy.hooks.torch import torch_hooks
from engines.lmdeploy.hooks.usage import usage_hooks
from engines.lmdeploy.patching import Hook


def all_hooks(resources: CpuResources) -> list[Hook]:
    """Every hook of every table, for the contract tests."""
    return [
        *torch_hooks(resources),
        *cpu_hooks(resources),
        *attention_hooks(),
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
        *server_hooks(),
        *prompt_hooks(),
        *span_hooks(),
    ]


__all__ = ["all_hooks"]
