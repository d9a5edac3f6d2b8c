"""The spec of DeepSeek-V4's hybrid self-attention."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dsa.csa import HybridSelfAttention, HybridSelfAttentionSubmodules
from megatron_dsa.modules.compressor import Compressor, CompressorSubmodules
from megatron_dsa.modules.csa_core import HybridCoreAttention, HybridCoreAttentionSubmodules
from megatron_dsa.modules.csa_indexer import CSAIndexer, CSAIndexerSubmodules


def hybrid_attention_spec(backend, *, is_mtp: bool = False) -> ModuleSpec:
    """Return the spec of hybrid self-attention with the layers of ``backend``.

    One spec serves all layers: a layer's compression ratio decides which of its parts are built.
    """
    norm = backend.layer_norm(rms_norm=True, for_qk=True)
    compressor = ModuleSpec(module=Compressor, submodules=CompressorSubmodules(norm=norm))
    indexer = ModuleSpec(module=CSAIndexer, submodules=CSAIndexerSubmodules(compressor=compressor))
    return ModuleSpec(
        module=HybridSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "is_mtp": is_mtp},
        submodules=HybridSelfAttentionSubmodules(
            linear_q_down_proj=backend.linear(),
            q_layernorm=norm,
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_proj=backend.linear(),
            kv_layernorm=norm,
            core_attention=ModuleSpec(
                module=HybridCoreAttention,
                submodules=HybridCoreAttentionSubmodules(compressor=compressor, indexer=indexer),
            ),
            # Never called: its weight is read, so it gains nothing from transformer-engine.
            linear_o_group_proj=ColumnParallelLinear,
            linear_proj=backend.row_parallel_linear(),
        ),
    )
