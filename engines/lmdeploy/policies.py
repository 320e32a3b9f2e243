"""The policies of one LMDeploy engine: eviction, order of the waiting queue, and pace of steps."""

from typing import Any

from engines.control.calls import CallEngine
from engines.control.errors import RefusedError
from engines.control.eviction import EvictionControl
from engines.control.policies import PolicyControl
from engines.control.schedule import ScheduleControl
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.schedule.pace_control import PaceControl, pace_of_settings
from engines.lmdeploy.schedule.scheduler import queue_of
from engines.lmdeploy.settings import EngineSettings
from engines.lmdeploy.trie.cache import TrieCache
from engines.lmdeploy.trie.eviction import eviction_of
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import DEFAULT_POLICY, LruPolicy, PolicyError
from kvcontrol.kv_policy.spec import parse_spec
from kvcontrol.kv_runtime import HierarchyManager

_HBM = CacheTier.HBM


class PolicySetupError(RuntimeError):
    """A policy of the settings can't be used; the message names the setting and the allowed values."""


class EnginePolicies(PolicyControl):
    """The policy control of one engine, begun with the policies of its settings."""

    def __init__(self, engine: Any, tiers: EngineTiers | None, call: CallEngine) -> None:
        def hierarchy() -> HierarchyManager | None:
            return None if tiers is None else tiers.hierarchy

        def ways_back() -> tuple[float | None, float | None]:
            """Both are measured where there are tiers, and nowhere else."""
            below = hierarchy()
            if below is None:
                return None, None
            return below.gate.ways_back(block_tokens=engine.cache_config.block_size)

        cache = TrieCache(engine, ways_back)
        self._engine = engine
        self._schedule = ScheduleControl(lambda: queue_of(engine.scheduler), first="fifo")
        self._pace = PaceControl(engine)
        eviction = EvictionControl(cache, hierarchy, call, first_policy=lambda _: LruPolicy.name)
        super().__init__(cache, eviction, call, (self._schedule, self._pace))

    def begin(self, settings: EngineSettings) -> None:
        """Put the settings' policies in charge, before the engine's first step. Raises ``PolicySetupError``."""
        chooses = eviction_of(self._engine.scheduler.block_trie) is not None
        tiers = set(self.eviction.kinds().values())
        try:
            for tier, text in first_policies(settings, chooses=chooses).items():
                if tier in tiers:
                    self.eviction.swap_part(tier, parse_spec(text), blocks=None, counts=False)
            self._schedule.swap(parse_spec(settings.schedule), counts=False)
            if self._pace.is_possible or settings.pace is not None:
                on_gpu = self._engine.engine_config.device_type != "cpu"
                self._pace.swap(pace_of_settings(settings, on_gpu=on_gpu), counts=False)
            if chooses:
                self.watch(settings.shadow_policies)
        except (PolicyError, RefusedError) as error:
            raise PolicySetupError(f"a policy of the engine's settings can't be used: {error}") from error


def first_policies(settings: EngineSettings, *, chooses: bool) -> dict[CacheTier, str]:
    """Return the eviction policies that an engine begins with. Where kvgate does not choose what leaves HBM
    (``chooses``), there is one of HBM only if the settings name one, which the engine then refuses.
    """
    first = {CacheTier.DDR: settings.ddr_policy, CacheTier.NVME: settings.nvme_policy}
    hbm = settings.hbm_policy or (DEFAULT_POLICY if chooses else None)
    return first if hbm is None else {_HBM: hbm, **first}
