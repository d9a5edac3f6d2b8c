"""Megatron's MLA with a core attention for 192/128 dims, missing in its local spec."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import build_module

from megatron_dsa.layers.linears import LocalNorm
from megatron_dsa.specs import LocalBackend
from tests.host import start


class PlainCore(torch.nn.Module):
    """softmax(q k / sqrt(d)) v with the mask it is given."""

    def __init__(self, softmax_scale=None, **_ignored):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, q, k, v, mask, **_ignored):
        logits = torch.einsum("sbhd,tbhd->bhst", q, k) * self.softmax_scale
        p = torch.softmax(logits.masked_fill(mask, float("-inf")), -1)
        return torch.einsum("bhst,tbhd->sbhd", p, v).flatten(2)


def megatron_mla(config):
    backend = LocalBackend()
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=backend.column_parallel_linear(),
        linear_q_down_proj=backend.latent_linear(),
        linear_q_up_proj=backend.column_parallel_linear(),
        linear_kv_down_proj=backend.latent_linear(),
        linear_kv_up_proj=backend.column_parallel_linear(),
        core_attention=PlainCore,
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=LocalNorm,
        kv_layernorm=LocalNorm,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = ModuleSpec(
        MLASelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )
    return build_module(spec, config=config, layer_number=1).to(start())
