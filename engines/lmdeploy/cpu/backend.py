"""LMDeploy's operator back end for the device ``cpu``.

Norms, embeddings and most of the rest are LMDeploy's own default (plain torch) operators; what is new is paged
attention and seeded sampling.
"""

from typing import Any

from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingBuildSpec

from engines.lmdeploy.cpu.attention import CpuAttentionMetadata, build_attention
from engines.lmdeploy.cpu.sampling import SeededMultinomialSampling
from engines.lmdeploy.cpu.step import plan_step


class CpuOpsBackend(DefaultOpsBackend):
    """Operators on a CPU; what is missing is refused when the model is built."""

    @staticmethod
    def get_name() -> str:
        return "cpu"

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        """Build an operator; raises ``UnsupportedModelError`` or LMDeploy's ``RuntimeError`` naming a missing one."""
        if isinstance(spec, PagedAttentionBuildSpec):
            return build_attention(spec)
        if isinstance(spec, MultinomialSamplingBuildSpec):
            return SeededMultinomialSampling()
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


__all__ = ["CpuOpsBackend"]
