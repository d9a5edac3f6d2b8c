"""The whole GPT model: Megatron's model configuration and builder, with sparse layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

from megatron.training.models import gpt

from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec


@dataclass(kw_only=True)
class DSAModelConfig(gpt.GPTModelConfig):
    """GPT model configuration whose layers, MTP layers included, use sparse attention."""

    builder: ClassVar[str] = "megatron_dsa.training.model.DSAModelBuilder"


class DSAModelBuilder(gpt.GPTModelBuilder):
    """Builds a GPT model from :class:`DSAModelConfig`."""

    def build_model(self, *args, **kwargs):
        """Build one stage; like the parent, but MTP layers are sparse as well."""
        if self._model_config.transformer_layer_spec is None:
            self._model_config.transformer_layer_spec = dsa_block_spec

        def mtp_block_spec(config, _layer_spec, vp_stage=None):
            return dsa_mtp_block_spec(config, vp_stage)

        # The parent derives MTP layers from Megatron's dense spec, through a module function.
        with mock.patch.object(gpt, "mtp_block_spec", mtp_block_spec):
            return super().build_model(*args, **kwargs)
