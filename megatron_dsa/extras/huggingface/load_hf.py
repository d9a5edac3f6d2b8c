"""Start from a Hugging Face checkpoint (``--dsa-load-hf``) or PEFT adapters (``--lora-load``)."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_tokenizer, print_rank_0

from megatron_dsa.config.model import is_indexer_parameter
from megatron_dsa.errors import require
from megatron_dsa.extras.huggingface.adapters import import_adapter
from megatron_dsa.extras.huggingface.config_json import read_config
from megatron_dsa.extras.huggingface.convert import import_model
from megatron_dsa.extras.huggingface.names import V3
from megatron_dsa.extras.huggingface.ranks import ParallelRank
from megatron_dsa.training.checkpoints import checkpoint_directory


def parallel_rank_of(model: torch.nn.Module) -> ParallelRank:
    """Return this process's rank in each parallel group, and the first layer of ``model``."""
    chunk: Any = model
    layers, config = chunk.decoder.layers, chunk.config

    def rank_and_size(name: str) -> tuple[int, int]:
        ask = (f"get_{name}_parallel_rank", f"get_{name}_parallel_world_size")
        rank, size = (getattr(parallel_state, function)() for function in ask)
        return rank, size

    return ParallelRank(
        tensor=rank_and_size("tensor_model"),
        expert_tensor=rank_and_size("expert_tensor"),
        expert=rank_and_size("expert_model"),
        first_layer=layers[0].layer_number - 1 if len(layers) else 0,
        num_experts=config.num_moe_experts,
        splits_latents=config.transformer_impl == "local",
    )


def importing_hook(args: argparse.Namespace) -> Callable[[list], list]:
    """Return a ``pre_wrap_hook`` that fills a fresh model before optimizers copy it."""

    def fill(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        if (found := checkpoint_directory(args)) is not None:
            print_rank_0(f"> {found} is loaded, --dsa-load-hf is not")
            return model
        tokens, words = get_tokenizer().vocab_size, read_config(args.dsa_load_hf).vocab_size
        require(
            tokens <= words,
            f"the tokenizer has {tokens} tokens, and --dsa-load-hf {args.dsa_load_hf} has weights "
            f"for {words} (vocab_size of config.json): give the tokenizer of the checkpoint, or "
            "add tokens to the checkpoint first",
        )
        fresh = 0
        for chunk in model:
            report = import_model(
                chunk, args.dsa_load_hf, parallel_rank_of(chunk), args.dsa_hf_without
            )
            fresh += sum(map(is_indexer_parameter, report.fresh))
        print_rank_0(f"> weights of {args.dsa_load_hf} are loaded")
        if fresh:
            print_rank_0(f"> it has no indexers: {fresh} tensors keep their initial values")
        return model

    return fill


def adapting_hook(args: argparse.Namespace) -> Callable[[list], list]:
    """Return a ``pre_wrap_hook`` that fills the adapters; a resumed checkpoint overrides them."""

    def fill(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        fresh = sum(import_adapter(x, args.lora_load, V3, parallel_rank_of(x)) for x in model)
        print_rank_0(f"> adapters of {args.lora_load} are loaded")
        if fresh:
            print_rank_0(f"> it has none of multi-token prediction: {fresh} tensors start anew")
        return model

    return fill
