"""Hooks that run LMDeploy without CUDA."""

from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import Hook

_AGENT = "lmdeploy.pytorch.engine.model_agent.agent"
_MODEL_INPUTS = "lmdeploy.pytorch.model_inputs.ModelInputs"
_CHECKPOINT_INPUTS = "lmdeploy.pytorch.engine.cache_inputs.CacheCheckpointInputs"
_CACHE_ENGINE = "lmdeploy.pytorch.engine.cache_engine"
_CONFIG = "lmdeploy.pytorch.config"


def cpu_hooks(resources: CpuResources) -> list[Hook]:
    """Hooks for LMDeploy's PyTorch engine without CUDA; installed after ``torch_hooks``."""
    return [*_configuration_hooks(), *_pool_hooks(resources), *_agent_hooks(resources)]


def _configuration_hooks() -> list[Hook]:
    from engines.lmdeploy.cpu import gates

    return [
        Hook(
            target="lmdeploy.messages:PytorchEngineConfig.__post_init__",
            signature="(self)",
            replace=gates.engine_config,
            why="it asserts a device and a dtype that exclude cpu and float32",
        ),
        Hook(
            target="lmdeploy.cli.utils:ArgumentHelper.device",
            signature="(parser, default: str = 'cuda', choices: list[str] = ['cuda', 'ascend', 'maca', 'camb'])",
            replace=gates.device_argument,
            why="--device cpu",
        ),
        Hook(
            target="lmdeploy.cli.utils:ArgumentHelper.dtype",
            signature="(parser, default: str = 'auto')",
            replace=gates.dtype_argument,
            why="--dtype float32",
        ),
        Hook(
            target="lmdeploy.utils:is_bf16_supported",
            signature="(device_type: str = 'cuda')",
            replace=gates.bf16_supported,
            why="it queries CUDA's compute capability",
        ),
        Hook(
            target="lmdeploy.utils:get_max_batch_size",
            signature="(device_type: str)",
            replace=gates.max_batch_size,
            why="it asserts a device other than cpu",
        ),
        Hook(
            target="lmdeploy.pytorch.check_env.torch:TorchChecker.__init__",
            signature="(self, device: str = 'cuda', logger=None) -> None",
            replace=gates.torch_checker,
            why="its trial tensor is made on cuda",
        ),
    ]


def _pool_hooks(resources: CpuResources) -> list[Hook]:
    from engines.lmdeploy.cpu import cache, selection

    return [
        Hook(
            target="lmdeploy.pytorch.backends.selector:_get_backend",
            signature="() -> type[lmdeploy.pytorch.backends.base.OpsBackend]",
            replace=selection.select(resources.threads),
            why="the operators of the device cpu",
        ),
        Hook(
            target=f"{_CACHE_ENGINE}.engine:CacheEngine.allocate_gpu_cache",
            signature="(self)",
            replace=cache.allocate_gpu_cache,
            why="the KV pool is allocated on cuda",
        ),
        Hook(
            target=f"{_CACHE_ENGINE}.state:_allocate_state_caches",
            signature=(
                f"(tensor_specs: collections.abc.Sequence[{_CACHE_ENGINE}.schema.CacheTensorSpec], num_caches: int, "
                f"device: torch.device | str) -> {_CACHE_ENGINE}.layout.CacheAllocation"
            ),
            replace=cache.allocate_state_caches,
            why="the state pool is allocated on cuda",
        ),
    ]


def _agent_hooks(resources: CpuResources) -> list[Hook]:
    from engines.lmdeploy.cpu import agent

    return [
        Hook(
            target=f"{_AGENT}:BaseModelAgent.__init__",
            signature=(
                f"(self, model_path: str, model_config: {_CONFIG}.ModelConfig, cache_config: {_CONFIG}.CacheConfig, "
                f"backend_config: {_CONFIG}.BackendConfig, misc_config: {_CONFIG}.MiscConfig, "
                "dist_ctx: lmdeploy.pytorch.distributed.DistContext, "
                "device_ctx: lmdeploy.pytorch.devices.device_manager.DeviceContext, adapters: dict[str, str] = None, "
                f"specdecode_config: {_CONFIG}.SpecDecodeConfig = None, trust_remote_code: bool = False)"
            ),
            replace=agent.agent_init,
            why="it names its device cuda",
        ),
        Hook(
            target=f"{_AGENT}:_try_to_cuda",
            signature="(val, non_blocking: bool = False)",
            replace=agent.host_to_device,
            why="inputs are copied to cuda",
        ),
        Hook(
            target=f"{_AGENT}:BatchedOutputs.to_cpu",
            signature="(self)",
            replace=agent.device_to_host,
            why="on a CPU it aliases tensors that the agent still updates",
        ),
        Hook(
            target=f"{_AGENT}:BaseModelAgent.warmup",
            signature="(self)",
            replace=agent.no_warmup,
            why="it captures graphs with inputs made on cuda",
        ),
        Hook(
            target=f"{_AGENT}:BaseModelAgent._async_model_forward",
            signature=(
                f"(self, inputs: {_MODEL_INPUTS}, return_logits: bool, "
                f"cache_inputs: {_CHECKPOINT_INPUTS} | None = None)"
            ),
            replace=agent.compute_on_own_thread(resources.threads),
            why="on a CPU it blocks the event loop of the scheduler",
        ),
    ]
