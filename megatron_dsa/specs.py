"""Layer and block specs for Megatron.

* :func:`dsa_block_spec`: for ``--spec megatron_dsa.specs dsa_block_spec``,
  ``GPTModelConfig.transformer_layer_spec`` and Megatron-Bridge's
  ``provider.transformer_layer_spec``.
* :func:`dsa_layer_spec`: one layer.
* :func:`dsa_hybrid_stack_spec`: for ``--spec`` and ``HybridModelConfig.hybrid_stack_spec``.
* ``dsa_local_layer_spec``, ``dsa_te_layer_spec``, ``dsa_local_hybrid_stack_spec``,
  ``dsa_te_hybrid_stack_spec``: spec objects with dense layers.
"""

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_dsa.config.extras import optional_extra
from megatron_dsa.config.model import (
    has_adapters,
    has_learned_head,
    hash_layers,
    options_of,
    shares_indices,
    uses_csa,
    uses_streams,
    validate,
)
from megatron_dsa.config.rules.hyper_connections import predicts_apart
from megatron_dsa.config.rules.kda import is_kda_layer
from megatron_dsa.config.rules.sizes import is_moe_layer
from megatron_dsa.csa import CSASelfAttention, CSASelfAttentionSubmodules
from megatron_dsa.dsa import DSASelfAttention, DSASelfAttentionSubmodules
from megatron_dsa.layers.backends import (
    LocalBackend as LocalBackend,
)
from megatron_dsa.layers.backends import (
    SeparateNorms,
    get_backend,
)
from megatron_dsa.layers.compressor import Compressor, CompressorSubmodules
from megatron_dsa.layers.csa_core import CSACoreAttention, CSACoreAttentionSubmodules
from megatron_dsa.layers.csa_indexer import CSAIndexer, CSAIndexerSubmodules
from megatron_dsa.layers.cuda_graphs import GraphedLayer
from megatron_dsa.layers.dsa_core import DSACoreAttention, DSACoreAttentionSubmodules
from megatron_dsa.layers.dsa_indexer import DSAIndexer, DSAIndexerSubmodules
from megatron_dsa.layers.hybrid import DSAHybridStack, HybridAttentionLayer
from megatron_dsa.layers.index_sharing import (
    IndexSharingHyperConnectionLayer,
    IndexSharingLayer,
)
from megatron_dsa.layers.kda.attention import KDASelfAttention, KDASelfAttentionSubmodules
from megatron_dsa.layers.linears import ReplicatedLinear
from megatron_dsa.layers.v4.hash_routing import with_hash_routing
from megatron_dsa.layers.v4.hyper_connections import (
    HyperConnectionLayer,
    StreamsHead,
    StreamsMean,
    StreamsNorm,
    StreamsWrite,
)
from megatron_dsa.layers.v4.stage_layers import layers_of_stage
from megatron_dsa.layers.v4.stream_prediction import HeadBeforePrediction, on_streams
from megatron_dsa.metrics.log import install_loss_scale
from megatron_dsa.patches import install, install_for_layers, install_for_model
from megatron_dsa.versions import require_supported_megatron, why_not_transformer_engine

require_supported_megatron()


def csa_attention_spec(backend, *, is_mtp: bool = False, fp8_indexer: bool = False) -> ModuleSpec:
    """Return the spec of V4's self-attention; layers build only required parts."""
    norm = backend.layer_norm(rms_norm=True, for_qk=True)
    compressor = ModuleSpec(module=Compressor, submodules=CompressorSubmodules(norm=norm))
    linear = backend.indexer_linear(fp8=True) if fp8_indexer else ReplicatedLinear
    indexer = ModuleSpec(
        module=CSAIndexer, submodules=CSAIndexerSubmodules(linear=linear, compressor=compressor)
    )
    return ModuleSpec(
        module=CSASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "is_mtp": is_mtp},
        submodules=CSASelfAttentionSubmodules(
            linear_q_down_proj=backend.linear(),
            q_layernorm=norm,
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_proj=backend.linear(),
            kv_layernorm=norm,
            core_attention=ModuleSpec(
                module=CSACoreAttention,
                submodules=CSACoreAttentionSubmodules(compressor=compressor, indexer=indexer),
            ),
            # Attention reads only the weight of this linear.
            linear_o_group_proj=ColumnParallelLinear,
            linear_proj=backend.row_parallel_linear(),
        ),
    )


def _attention_spec(
    backend,
    *,
    rms_norm: bool = True,
    qk_layernorm: bool = True,
    is_mtp: bool = False,
    fp8_indexer: bool = False,
) -> ModuleSpec:
    linear = backend.indexer_linear(fp8_indexer)
    indexer = ModuleSpec(
        module=DSAIndexer,
        submodules=DSAIndexerSubmodules(
            linear_wq_b=linear,
            linear_wk=linear,
            k_norm=backend.layer_norm(rms_norm=False, for_qk=True),
            linear_weights_proj=linear,
        ),
    )
    # The indexer reads the norm's output, so the norm is not fused.
    latent_norm = backend.layer_norm(rms_norm=rms_norm, for_qk=True) if qk_layernorm else IdentityOp
    return ModuleSpec(
        module=DSASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=DSASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.latent_linear(),
            linear_q_up_proj=backend.column_parallel_linear(),
            linear_kv_down_proj=backend.latent_linear(),
            linear_kv_up_proj=backend.absorbed_linear(),
            core_attention=ModuleSpec(
                module=DSACoreAttention,
                params={"is_mtp": is_mtp},
                submodules=DSACoreAttentionSubmodules(indexer=indexer),
            ),
            linear_gate=backend.column_parallel_linear(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
    )


def _kda_spec(backend) -> ModuleSpec:
    return ModuleSpec(
        module=KDASelfAttention,
        submodules=KDASelfAttentionSubmodules(
            by_heads=backend.column_parallel_linear(),
            of_tokens=backend.linear(),
            linear_proj=backend.row_parallel_linear(),
        ),
    )


def _layer_spec(
    backend,
    attention: ModuleSpec,
    *,
    layer: type = GraphedLayer,
    rms_norm: bool = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=rms_norm, has_residual=True)
    # transformer-engine fuses the norm into a dense MLP.
    fused_mlp_norm = backend.fuse_layernorm_and_linear() and num_experts is None
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused_mlp_norm else norm,
            mlp=gpt_layer_specs.get_mlp_module_spec_for_backend(
                backend=backend, num_experts=num_experts, moe_grouped_gemm=moe_grouped_gemm
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _with_streams(config, spec: ModuleSpec) -> ModuleSpec:
    shared = spec.module is IndexSharingLayer
    changed = dataclasses.replace(
        spec.submodules,
        input_layernorm=StreamsNorm,
        self_attn_bda=StreamsWrite,
        pre_mlp_layernorm=StreamsNorm,
        mlp_bda=StreamsWrite,
    )
    layer = IndexSharingHyperConnectionLayer if shared else HyperConnectionLayer
    return ModuleSpec(module=layer, submodules=changed)


def _transformer_config(config):
    return getattr(config, "transformer", config)


def dsa_layer_spec(
    config, *, moe: bool = False, is_mtp: bool = False, kda: bool = False
) -> ModuleSpec:
    """Return the spec of one decoder layer, with V4's attention for ``csa_compress_ratios``.

    Args:
        config: a transformer configuration, or a model configuration that contains one.
        moe: experts instead of a dense MLP.
        is_mtp: the layer is for multi-token prediction.
        kda: Kimi Delta Attention instead of sparse attention.

    Raises:
        ConfigError: unsupported configuration.
    """
    config = _transformer_config(config)
    validate(config)
    install_loss_scale(config)
    optional_extra("muon.patch")  # the import registers Muon's patches
    install_for_layers(config)
    backend, rms_norm = get_backend(config.transformer_impl), config.normalization == "RMSNorm"
    fp8_indexer = options_of(config).fp8_indexer
    if kda:
        attention = _kda_spec(backend)
    elif uses_csa(config):
        attention = csa_attention_spec(backend, is_mtp=is_mtp, fp8_indexer=fp8_indexer)
    else:
        attention = _attention_spec(
            backend,
            rms_norm=rms_norm,
            qk_layernorm=config.qk_layernorm,
            is_mtp=is_mtp,
            fp8_indexer=fp8_indexer,
        )
    streams = has_learned_head(config) if is_mtp else uses_streams(config)
    shares = shares_indices(config) and not (is_mtp or kda)
    spec = _layer_spec(
        SeparateNorms(backend) if streams or has_adapters(config) else backend,
        attention,
        layer=IndexSharingLayer if shares else GraphedLayer,
        rms_norm=rms_norm,
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    return _with_streams(config, spec) if streams else spec


def dsa_block_spec(
    config, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return the specs of this pipeline stage's layers.

    ``config`` as for :func:`dsa_layer_spec`; ``vp_stage``, ``pp_rank``: virtual stage and pipeline
    rank.
    """
    config = _transformer_config(config)
    if config.dsa_indexer_topk_freq > 1:
        # One checkpoint tensor cannot stack layers with and without indexer. Stage dense must
        # match, since later stages load its checkpoint.
        config.hetereogenous_dist_checkpoint = True
    if uses_streams(config) and predicts_apart(config):
        # The last layer's stage sends a larger tensor, so pipeline stages exchange shapes.
        config.mtp_standalone = True
    install_for_model(config)

    @functools.cache
    def layer(moe: bool, kda: bool) -> ModuleSpec:
        return dsa_layer_spec(config, moe=moe, kda=kda)

    hashed = with_hash_routing(layer(True, False)) if hash_layers(config) else None
    layer_ids = layers_of_stage(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[
            hashed
            if i < hash_layers(config)
            else layer(is_moe_layer(config, i), is_kda_layer(config, i))
            for i in layer_ids
        ],
        layer_norm=_final_norm(config),
    )


def _final_norm(config) -> type:
    if not uses_streams(config):
        backend = get_backend(config.transformer_impl)
        return backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    if not has_learned_head(config):
        return StreamsMean
    return HeadBeforePrediction if config.mtp_num_layers else StreamsHead


def dsa_mtp_block_spec(config, vp_stage: int | None = None) -> Any:
    """Return the multi-token-prediction block spec, or ``None``."""
    config = _transformer_config(config)
    if config.mtp_num_layers is None:
        return None
    moe = is_moe_layer(config, config.num_layers - 1)
    layer = TransformerBlockSubmodules(layer_specs=[dsa_layer_spec(config, moe=moe, is_mtp=True)])
    backend = get_backend(config.transformer_impl)
    block = gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(
        config=config, spec=layer, backend=backend, vp_stage=vp_stage
    )
    if block is None or not has_learned_head(config):
        return block
    return on_streams(block, backend.linear())


def dsa_hybrid_stack_spec(config) -> ModuleSpec:
    """Return the spec of a hybrid stack whose layers ``D`` have sparse attention.

    Without transformer-engine other layers may be ``-``, ``E``, ``G`` and multi-token prediction.
    ``config`` as for :func:`dsa_layer_spec`, with a ``layer_pattern``.

    Raises:
        ConfigError: unsupported configuration.
    """
    config = _transformer_config(config)
    layer = dsa_layer_spec(config)
    experts = None if config.num_moe_experts is None else dsa_layer_spec(config, moe=True)
    backend = get_backend(config.transformer_impl)
    return _hybrid_spec(backend, layer, experts, local=config.transformer_impl == "local")


def _hybrid_spec(
    backend, layer: ModuleSpec, experts: ModuleSpec | None = None, *, local: bool
) -> ModuleSpec:
    attention = _part(
        HybridAttentionLayer, layer, "input_layernorm", "self_attention", "self_attn_bda"
    )
    if not local:
        megatron = hybrid_layer_specs.hybrid_stack_spec.submodules
        parts = dataclasses.replace(megatron, dsa_layer=attention)
    else:
        mlp = "pre_mlp_layernorm", "mlp", "mlp_bda"
        parts = HybridStackSubmodules(
            dsa_layer=attention,
            mlp_layer=_part(MLPLayer, layer, *mlp),
            moe_layer=IdentityOp if experts is None else _part(MoETransformerLayer, experts, *mlp),
            gdn_layer=_local_gated_delta_net(backend),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    layer_specs=[get_mtp_layer_spec_for_backend(attention, backend)]
                ),
            ),
        )
    return ModuleSpec(
        module=DSAHybridStack, params={"norm": backend.layer_norm(rms_norm=True)}, submodules=parts
    )


def _part(module: type, layer: ModuleSpec, *names: str) -> ModuleSpec:
    parts = {name: getattr(layer.submodules, name) for name in names}
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


def _local_gated_delta_net(backend) -> ModuleSpec:
    norm = backend.layer_norm(rms_norm=True)
    mixer = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_linear(),
        out_norm=norm,
        out_proj=backend.row_parallel_linear(),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=GatedDeltaNet, submodules=mixer),
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _dense_spec(transformer_impl: str, hybrid: bool) -> ModuleSpec:
    install("packed targets")
    install("prediction loss")
    backend = get_backend(transformer_impl)
    layer = _layer_spec(backend, _attention_spec(backend))
    return _hybrid_spec(backend, layer, local=transformer_impl == "local") if hybrid else layer


_READY = {
    "dsa_local_layer_spec": ("local", False),
    "dsa_local_hybrid_stack_spec": ("local", True),
    "dsa_te_layer_spec": ("transformer_engine", False),
    "dsa_te_hybrid_stack_spec": ("transformer_engine", True),
}


def __getattr__(name: str):
    # ``_dense_spec`` raises if transformer-engine cannot be used.
    if name in _READY:
        return _dense_spec(*_READY[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ``--spec`` uses vars(module), which ignores __getattr__.
for _name, (_impl, _hybrid) in _READY.items():
    if _impl == "local" or why_not_transformer_engine(torch.cuda.is_available()) is None:
        globals()[_name] = _dense_spec(_impl, _hybrid)
