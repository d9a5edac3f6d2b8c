"""GPT and hybrid models with sparse layers, and their start-up table."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import print_rank_0
from megatron.training.models import gpt, hybrid
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_dsa.config.attention_choice import AttentionChoice, attention_of
from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.model import (
    has_adapters,
    hash_layers,
    uses_csa,
)
from megatron_dsa.errors import require
from megatron_dsa.layers.cuda_graphs import describe_graphs
from megatron_dsa.ops.dispatch import Choice, collect_choices
from megatron_dsa.ops.dispatch.choice_log import NO_GPU
from megatron_dsa.specs import dsa_block_spec, dsa_hybrid_stack_spec, dsa_mtp_block_spec


@dataclass(kw_only=True)
class DSAModelConfig(gpt.GPTModelConfig):
    """GPT configuration with sparse attention, also in MTP layers."""

    lists_optimizers: bool = False
    builder: ClassVar[str] = "megatron_dsa.training.model.DSAModelBuilder"


@dataclass(kw_only=True)
class DSAHybridModelConfig(hybrid.HybridModelConfig):
    """Hybrid configuration whose transformer configuration has a ``layer_pattern``."""

    lists_optimizers: bool = False
    builder: ClassVar[str] = "megatron_dsa.training.model.DSAHybridModelBuilder"


class _Builder:
    _model_config: Any

    def build_distributed_models(self, pg_collection, *args, **kwargs) -> list[Any]:
        _check_embedding_group(self._model_config, pg_collection)
        with collect_choices() as choices:
            models = super().build_distributed_models(pg_collection, *args, **kwargs)  # type: ignore[misc]
        config = self._model_config.transformer
        print_start_table(choices, None if uses_csa(config) else attention_of(config))
        for line in describe_graphs(config):
            print_rank_0(f"> megatron_dsa {line}")
        if self._model_config.lists_optimizers:
            load_extra("muon.table", "--optimizer muon").print_optimizer_table(models, config)
        if has_adapters(config):
            load_extra("lora.lora", "--lora-rank").print_adapters(models, config)
        return models


class DSAModelBuilder(_Builder, gpt.GPTModelBuilder):
    def build_model(self, *args, **kwargs) -> Any:
        transformer = self._model_config.transformer
        if hash_layers(transformer) and transformer.moe_hash_vocab_size is None:
            transformer.moe_hash_vocab_size = padded_vocabulary(self._model_config)
        if self._model_config.transformer_layer_spec is None:
            self._model_config.transformer_layer_spec = dsa_block_spec

        def mtp_block_spec(config, _layer_spec, vp_stage=None):
            return dsa_mtp_block_spec(config, vp_stage)

        # Megatron derives MTP layers from its dense spec.
        with mock.patch.object(gpt, "mtp_block_spec", mtp_block_spec):
            model = super().build_model(*args, **kwargs)
        if has_adapters(transformer):
            load_extra("lora.lora", "--lora-rank").add_adapters(model, transformer)
        if transformer.mtp_use_repeated_layer:
            accumulate_in_every_call(model)
        return model


class DSAHybridModelBuilder(_Builder, hybrid.HybridModelBuilder):
    def build_model(self, *args, **kwargs) -> Any:
        transformer, spec = self._model_config.transformer, self._model_config.hybrid_stack_spec
        if not isinstance(spec, ModuleSpec):
            self._model_config.hybrid_stack_spec = (spec or dsa_hybrid_stack_spec)(transformer)
        model = super().build_model(*args, **kwargs)
        if transformer.mtp_use_repeated_layer:
            accumulate_in_every_call(model)
        return model


def accumulate_in_every_call(model: torch.nn.Module) -> None:
    """Make a repeated prediction layer accumulate gradients in every call.

    transformer-engine overwrites gradients in the first call's backward, which runs last.
    """
    for module in getattr(model, "mtp", torch.nn.Module()).modules():
        if hasattr(module, "disable_parameter_transpose_cache"):
            # Without the cache, every call quantises FP8 weights.
            module.disable_parameter_transpose_cache = True


def padded_vocabulary(model: Any) -> int:
    if not model.should_pad_vocab:
        return model.vocab_size
    return calculate_padded_vocab_size(
        model.vocab_size,
        model.make_vocab_size_divisible_by,
        model.transformer.tensor_model_parallel_size,
    )


def embedding_ranks(model: DSAModelConfig) -> Callable[[list[int]], list[int]]:
    """Return ``get_embedding_ranks`` for Megatron's ``pretrain()``."""

    def ranks(pipeline: list[int]) -> list[int]:
        found = {pipeline[0], *get_mtp_ranks(pipeline, model.transformer)}
        if model.share_embeddings_and_output_weights:
            found.add(pipeline[-1])
        return sorted(found)

    return ranks


def _check_embedding_group(model: DSAModelConfig, pg_collection) -> None:
    group = getattr(pg_collection, "embd", None)
    if not (model.transformer.mtp_num_layers and isinstance(group, torch.distributed.ProcessGroup)):
        return
    of = torch.distributed.get_process_group_ranks
    expected = embedding_ranks(model)(of(pg_collection.pp))
    require(
        sorted(of(group)) == expected,
        f"the embedding's process group must have the ranks {expected}, got {sorted(of(group))}: "
        "multi-token prediction has a copy of the embedding. Give Megatron's pretrain() "
        "get_embedding_ranks=embedding_ranks(model) of megatron_dsa.pretrain",
    )


def start_table(choices: Iterable[Choice]) -> list[str]:
    remarks: dict[tuple[str, str], str] = {}
    for choice in choices:
        # Keep the first reason: reasons may differ by shape.
        remark = "" if choice.no_gpu else choice.remark()
        remarks.setdefault((choice.operation, choice.candidate.name), remark)
    table = [("operation", "implementation", "reason")]
    table += sorted((*key, remark) for key, remark in remarks.items())
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return [
        f"{operation:{widths[0]}}  {implementation:{widths[1]}}  {remark}".rstrip()
        for operation, implementation, remark in table
    ]


def print_start_table(choices: Iterable[Choice], attention: AttentionChoice | None = None) -> None:
    choices = list(choices)
    if choices:
        why = f"{NO_GPU}; " if any(choice.no_gpu for choice in choices) else ""
        print_rank_0(f"> megatron_dsa runs ({why}--dsa-log-dispatch: all rejected candidates):")
        for line in start_table(choices):
            print_rank_0(f">   {line}")
        if attention is not None:
            print_rank_0(f"> megatron_dsa {attention.describe()}")
