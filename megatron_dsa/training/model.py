"""The whole GPT model: Megatron's model configuration and builder, with sparse layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from megatron.training.models import gpt

from megatron_dsa.dispatch import collect_choices
from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec
from megatron_dsa.training.start_table import print_start_table


@dataclass(kw_only=True)
class DSAModelConfig(gpt.GPTModelConfig):
    """GPT model configuration whose layers, MTP layers included, use sparse attention."""

    builder: ClassVar[str] = "megatron_dsa.training.model.DSAModelBuilder"


class DSAModelBuilder(gpt.GPTModelBuilder):
    """Builds a GPT model from :class:`DSAModelConfig`."""

    def build_distributed_models(self, *args, **kwargs) -> list[Any]:
        """Build all stages of this rank; like the parent, and print what runs their operations."""
        with collect_choices() as choices:
            models = super().build_distributed_models(*args, **kwargs)
        print_start_table(choices)
        return models

    def build_model(self, *args, **kwargs) -> Any:
        """Build one stage; like the parent, but MTP layers are sparse as well."""
        if self._model_config.transformer_layer_spec is None:
            self._model_config.transformer_layer_spec = dsa_block_spec

        def mtp_block_spec(config, _layer_spec, vp_stage=None):
            return dsa_mtp_block_spec(config, vp_stage)

        # The parent derives MTP layers from Megatron's dense spec, through a module function.
        with mock.patch.object(gpt, "mtp_block_spec", mtp_block_spec):
            return super().build_model(*args, **kwargs)
