"""LMDeploy's operator back end for the device ``cpu``.

Paged attention, LoRA and seeded sampling are new; linear layers, RMS norm and rotary embedding are LMDeploy's own, made
quicker for one row; the rest are LMDeploy's default operators in plain torch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from lmdeploy.pytorch.backends.apply_rotary_emb import ApplyRotaryEmbBuildSpec
from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.linear import LinearBuildSpec
from lmdeploy.pytorch.backends.lora import LoRABuildSpec
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec
from lmdeploy.pytorch.backends.norm import RMSNormBuildSpec

from engines.lmdeploy.cpu.attention import CpuAttentionMetadata, build_attention
from engines.lmdeploy.cpu.linear import CpuLinear
from engines.lmdeploy.cpu.lora import CpuLoRA
from engines.lmdeploy.cpu.norm import CpuRMSNorm
from engines.lmdeploy.cpu.rotary import CpuApplyRotary
from engines.lmdeploy.cpu.sampling import SeededMultinomialSampling
from engines.lmdeploy.cpu.step import plan_step

_WITHOUT_SHAPE: dict[type, Callable[[], Any]] = {
    LoRABuildSpec: CpuLoRA,
    MultinomialSamplingBuildSpec: SeededMultinomialSampling,
}


class CpuOpsBackend(DefaultOpsBackend):
    """Operators on a CPU; a missing one is refused when the model is built."""

    threads: ClassVar[int] = 1

    @staticmethod
    def get_name() -> str:
        return "cpu"

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        """Build an operator; raises ``UnsupportedModelError`` or LMDeploy's ``RuntimeError`` naming a missing one."""
        if isinstance(spec, PagedAttentionBuildSpec):
            return build_attention(spec)
        if (operator := _WITHOUT_SHAPE.get(type(spec))) is not None:
            return operator()
        if isinstance(spec, RMSNormBuildSpec):
            return CpuRMSNorm(spec.hidden_size, spec.eps)
        if isinstance(spec, ApplyRotaryEmbBuildSpec):
            return _rotary()
        if isinstance(spec, LinearBuildSpec) and not enable_deterministic:
            return CpuLinear(threads=cls.threads, in_features=spec.in_features, out_features=spec.out_features)
        return super().build_op(spec, enable_deterministic=enable_deterministic)

    @staticmethod
    def get_attention_metadata_cls() -> type[CpuAttentionMetadata]:
        return CpuAttentionMetadata

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        """Plan the forward once for all layers."""
        step = plan_step(
            page_tokens=step_context.cache_config.kernel_block_size,
            page_table=step_context.block_offsets,
            new_tokens=step_context.q_seqlens.tolist(),
            tokens=step_context.kv_seqlens.tolist(),
            dtype=step_context.model_config.dtype,
        )
        step_context.attn_metadata = CpuAttentionMetadata(
            is_decoding=step_context.is_decoding,
            block_offsets=step_context.block_offsets,
            q_start_loc=step_context.q_start_loc,
            q_seqlens=step_context.q_seqlens,
            kv_seqlens=step_context.kv_seqlens,
            quant_policy=step_context.kv_quant_policy,
            step=step,
        )
        return step_context

    @staticmethod
    def ccl_backend() -> str:
        return "gloo"

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def support_ray() -> bool:
        return False


@cache
def _rotary() -> CpuApplyRotary:
    return CpuApplyRotary()


@cache
def backend_for(threads: int) -> type[CpuOpsBackend]:
    """Return the back end whose operators are laid out for ``threads`` (LMDeploy wants a class, not an object)."""
    return type("CpuOpsBackend", (CpuOpsBackend,), {"threads": threads})
