"""The tables of all hooks on LMDeploy 0.18: every private symbol, its signature, and the reason.

A file per concern, in it a function per purpose that returns its hooks; ``patching.install`` checks a table as a whole
before it changes anything. The replacements live beside their subject (``cpu/``, ``lifeline.py``, ``events.py``, …);
this package holds names and signatures only, and nothing else in kvgate patches. Every table here has contract
tests. Asking for a table imports torch, never LMDeploy: that is for ``install``, once torch is as LMDeploy wants it.
"""

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

__all__ = [
    "admission_hooks",
    "attention_hooks",
    "cpu_hooks",
    "event_hooks",
    "eviction_hooks",
    "host_hooks",
    "interruption_hooks",
    "key_hooks",
    "lifeline_hooks",
    "pd_hooks",
    "prompt_hooks",
    "schedule_hooks",
    "server_hooks",
    "span_hooks",
    "step_hooks",
    "tenant_hooks",
    "tier_hooks",
    "torch_hooks",
    "usage_hooks",
]
