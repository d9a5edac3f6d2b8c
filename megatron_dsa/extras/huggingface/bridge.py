"""Megatron-Bridge's conversion and providers with sparse layers; needs ``megatron.bridge``."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.bridge.models import gpt_provider
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple, MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ReplicatedMapping
from megatron.bridge.models.deepseek import DeepSeekV3Bridge
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_model_config
from transformers import PretrainedConfig

from megatron_dsa.config.model import DSAOptions, has_adapters, validate
from megatron_dsa.config.transformer import DSATransformerConfig
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.config_json import HFModel, parse_config
from megatron_dsa.extras.huggingface.models import MODELS
from megatron_dsa.extras.huggingface.names import INDEXER, V3
from megatron_dsa.layers.freezing import freeze_for_stage
from megatron_dsa.layers.linears import ReplicatedLinear
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

AutoMapping.register_module_type(ReplicatedLinear.__name__, "replicated")
# Bridge checkpoints name the provider's class; Bridge loads classes of known packages only.
register_allowed_target_prefix("megatron_dsa.")


def _registered(model_type: str) -> Callable[[type], type]:
    return MegatronModelBridge.register_bridge(
        source=MODELS[model_type].architecture,
        target=GPTModel,
        provider=MLAModelProvider,
        model_type=model_type,
    )


@_registered("deepseek_v32")
class DeepSeekV32Bridge(DeepSeekV3Bridge):
    def mapping_registry(self) -> MegatronMappingRegistry:
        mappings = super().mapping_registry().get_all_mappings()
        mtp = getattr(self.hf_config, "num_nextn_predict_layers", 0) or 0
        prefixes = [("decoder.layers.*.", V3.layer_prefix.format("*"))]
        for layer, theirs in enumerate(V3.mtp_prefixes(mtp, self.hf_config.num_hidden_layers)):
            prefixes.append((f"mtp.layers.{layer}.mtp_model_layer.", theirs))
        mappings += [
            ReplicatedMapping(f"{ours}{line.megatron[0]}", f"{theirs}{line.hf[0]}")
            for line in V3.layer
            if line.megatron[0].startswith(INDEXER)
            for ours, theirs in prefixes
        ]
        return MegatronMappingRegistry(*mappings)

    def stream_weights_megatron_to_hf(
        self, megatron_model, *args, **kwargs
    ) -> Iterator[HFWeightTuple]:
        """Yield all tensors and MTP's copies of embedding and head; strict saving needs both."""
        config = get_model_config(megatron_model[0])
        prefixes = V3.mtp_prefixes(config.mtp_num_layers or 0, config.num_layers)
        for found in super().stream_weights_megatron_to_hf(megatron_model, *args, **kwargs):
            yield found
            for copy, original in V3.copies.items():
                if found.param_name == original:
                    for prefix in prefixes:
                        yield HFWeightTuple(prefix + copy, found.weight.clone())


@_registered("deepseek_v3")
class DeepSeekV3WithIndexersBridge(DeepSeekV32Bridge):
    """DeepSeek-V3's conversion, also with fresh indexers, which Bridge's class rejects."""


@dataclass
class SparseModelProvider(MLAModelProvider, DSATransformerConfig):
    """Bridge's MLA provider with sparse attention."""

    transformer_layer_spec: Callable = dsa_block_spec

    def finalize(self) -> None:
        super().finalize()
        validate(self)
        require(
            not has_adapters(self),
            "lora_rank is not supported with Megatron-Bridge: its loader does not know these "
            "adapters; train with python -m megatron_dsa.pretrain, or take Bridge's own PEFT",
        )

    def provide(self, *args, **kwargs) -> GPTModel:
        # The parent's function builds MTP layers of transformer-engine.
        with mock.patch.object(gpt_provider, "mtp_block_spec", dsa_mtp_block_spec):
            model = super().provide(*args, **kwargs)
        return freeze_for_stage([model])[0]


class IndexerMetrics(Callback):
    """Indexer loss and metrics in Bridge's log: ``pretrain(..., callbacks=[IndexerMetrics()])``."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        state = context.state
        means: dict[str, torch.Tensor] = {}
        IndexerLog.log(
            state.train_state.step + 1, means, bool(context.skipped_iter),
            state.tensorboard_logger, state.wandb_logger,
        )  # fmt: skip
        context.loss_dict.update(means)


def sparse_provider(
    bridge: AutoBridge, options: DSAOptions = DSAOptions(), load_weights: bool = True
) -> SparseModelProvider:
    """Return Bridge's model provider with our layers.

    Rope, router, norms and indexer follow config.json, all other settings Bridge.

    Args:
        bridge: for DeepSeek-V3, DeepSeek-V3.2 or GLM-5.
        options: the model's ``latent_norm_epsilon`` overrides theirs.
        load_weights: fill the model from the checkpoint.

    Raises:
        ConfigError: config.json is not understood, or describes another model.
    """
    hf = _described(bridge)
    if hf.names is not V3:
        raise ConfigError(
            f"Megatron-Bridge's conversion of {hf.names.models} does not fit these layers: use "
            "python -m megatron_dsa import-hf"
        )
    provider = SparseModelProvider()
    provider.__dict__.update(bridge.to_megatron_provider(load_weights).__dict__)
    provider.__dict__.update(hf.fields)
    provider.experimental_attention_variant = None  # a variant would select Megatron's DSA
    if not hf.mtp_layers:  # transformers' default may add MTP
        provider.mtp_num_layers = None
    provider.transformer_layer_spec = dsa_block_spec
    provider.dsa = dataclasses.replace(options, latent_norm_epsilon=hf.latent_norm_epsilon)
    return provider


def _described(bridge: AutoBridge) -> HFModel:
    source: Any = bridge.hf_pretrained
    if isinstance(source, PretrainedConfig):
        return parse_config(source.to_dict())
    # Read config.json itself: transformers' config classes change keys.
    found, _ = PretrainedConfig.get_config_dict(
        source.model_name_or_path, revision=bridge.hf_model_revision
    )
    return parse_config(found)
