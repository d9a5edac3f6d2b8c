"""Blocks of multi-token prediction of another class than Megatron's, named by their spec."""

import functools


@functools.cache
def build_prediction_blocks_from_specs() -> None:
    """Let models build the class that the module spec of a block names; others see no change."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer.spec_utils import ModuleSpec

    original = gpt_model.MultiTokenPredictionBlock

    def build(*, spec, **others):
        block = spec.module if isinstance(spec, ModuleSpec) else original
        return block(spec=spec, **others)

    gpt_model.MultiTokenPredictionBlock = build
