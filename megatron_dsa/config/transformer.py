"""Megatron's MLA configuration with this package's fields."""

from dataclasses import dataclass, field
from typing import Any, Self

from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_dsa.config.fields import option_fields
from megatron_dsa.config.model import CSAFields, StreamFields, validate
from megatron_dsa.config.options import DSAOptions
from megatron_dsa.versions import require_supported_megatron

require_supported_megatron()


@dataclass
class DSATransformerConfig(StreamFields, MLATransformerConfig):
    """Megatron's MLA configuration with :class:`DSAOptions`, validated.

    ``layer_pattern`` is a hybrid model's ``hybrid_layer_pattern``.
    """

    dsa: DSAOptions = field(default_factory=DSAOptions)
    layer_pattern: str | None = None

    def __post_init__(self):
        self._derive()
        super().__post_init__()
        validate(self)

    def _derive(self) -> None:
        if self.moe_hash_layers or self.linear_attention_freq is not None:
            # Different kinds of layers cannot be stacked in one checkpoint tensor.
            self.hetereogenous_dist_checkpoint = True

    @classmethod
    def from_mla(cls, config: MLATransformerConfig, options: DSAOptions, **values: Any) -> Self:
        """Convert Megatron's MLA ``config``; ``values`` sets fields of a subclass.

        All fields are copied, because Megatron's ``__post_init__`` must not run twice.
        """
        ours = cls.__new__(cls)
        defaults = {each.name: each.default for each, _ in option_fields(cls)}
        ours.__dict__.update(defaults | config.__dict__ | values, dsa=options)
        ours._derive()
        validate(ours)
        return ours


@dataclass
class CSATransformerConfig(CSAFields, DSATransformerConfig):
    """Configuration of DeepSeek-V4's window, CSA and HCA attention.

    The single key/value head has ``v_head_dim`` dims; rope rotates the last
    ``qk_pos_emb_head_dim``.
    ``kv_lora_rank`` is unused.
    """

    def _derive(self) -> None:
        super()._derive()
        if self.csa_compress_ratios is not None:
            self.csa_compress_ratios = [int(ratio) for ratio in self.csa_compress_ratios]
            # Different kinds of layers cannot be stacked in one checkpoint tensor.
            self.hetereogenous_dist_checkpoint = True
