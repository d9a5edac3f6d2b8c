"""Model configuration from parsed flags, and the training forward step."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)

from megatron_dsa.arguments import field_values, options_from_args
from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.transformer import CSATransformerConfig, DSATransformerConfig
from megatron_dsa.layers.freezing import freeze_for_stage
from megatron_dsa.metrics.throughput import installed
from megatron_dsa.ops.dispatch import log_all_candidates
from megatron_dsa.ops.dispatch.operation import TIMES
from megatron_dsa.training.data import check_cp_layout, get_batch
from megatron_dsa.training.flag_rules import MUON, apply_yarn_flags, check_flags
from megatron_dsa.training.model import DSAHybridModelConfig, DSAModelConfig
from megatron_dsa.training.provenance import record_provenance


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's loss, the divisor of its gradient, and values for the log.

    Megatron divides by the divisor and averages gradients over context-parallel ranks. The divisor
    therefore counts tokens of all these ranks, and the loss is multiplied by the number of ranks.
    With ``--calculate-per-token-loss`` Megatron sums local counts.

    Args:
        loss_mask: ``[b, s]`` of local tokens, 0 outside the loss.
        losses: ``[b, s]``, loss per token.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    log = {"lm loss": torch.stack([total.detach(), tokens.float()])}
    ranks = mpu.get_context_parallel_world_size()
    if ranks > 1 and not get_args().calculate_per_token_loss:
        total = total * ranks
        torch.distributed.all_reduce(tokens, group=mpu.get_context_parallel_group())
    return total, tokens, log


def forward_step(data_iterator, model, return_schedule_plan: bool = False) -> tuple[Any, Callable]:
    """Run one microbatch; return per-token losses and the function that reduces them.

    With ``return_schedule_plan`` (``--overlap-moe-expert-parallel-comm``) return Megatron's plan of
    the layers instead of losses.
    """
    TIMES.paused = not model.training
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch, packed = get_batch(data_iterator, get_model_config(model), vp_stage)
    timers("batch-generator").stop()
    counter = installed()
    # Count a batch once, in training only.
    if counter is not None and packed is not None and model.training and not vp_stage:
        counter.count_documents(packed.cu_seqlens_q)
    # Attention ignores the mask, and graph replays would copy it.
    graphed = get_model_config(model).cuda_graph_impl != "none"
    run = model.build_schedule_plan if return_schedule_plan else model
    losses = run(
        batch["tokens"],
        batch["position_ids"],
        None if graphed else batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    return losses, functools.partial(loss_function, batch["loss_mask"])


def model_config_from_args(args) -> DSAModelConfig | DSAHybridModelConfig:
    check_flags(args)
    record_provenance(args)
    check_cp_layout(args)
    TIMES.on = args.dsa_time_operations
    if args.dsa_log_dispatch:
        log_all_candidates()
    mla = core_transformer_config_from_args(_without_bundled_attention(args))
    apply_yarn_flags(args, mla)
    options = options_from_args(args)
    if args.csa_compress_ratios is not None:
        csa = field_values(CSATransformerConfig, args)
        config = CSATransformerConfig.from_mla(mla, options, **csa)
    else:
        values = field_values(DSATransformerConfig, args) | {
            "layer_pattern": args.hybrid_layer_pattern
        }
        config = DSATransformerConfig.from_mla(mla, options, **values)
    model: Any
    if args.hybrid_layer_pattern is None:
        model = gpt_config_from_args(args, config=config, model_config_cls=DSAModelConfig)
    else:
        model = hybrid_config_from_args(args, config, DSAHybridModelConfig)
    model.lists_optimizers = args.optimizer in MUON
    if args.dsa_load_hf is not None:
        extra = load_extra("huggingface.load_hf", "--dsa-load-hf")
        model.pre_wrap_hooks.append(extra.importing_hook(args))
    if args.lora_load is not None:
        extra = load_extra("huggingface.load_hf", "--lora-load")
        model.pre_wrap_hooks.append(extra.adapting_hook(args))
    model.pre_wrap_hooks.append(freeze_for_stage)
    return model


def _without_bundled_attention(args) -> argparse.Namespace:
    """Replace letters D of a layer pattern, which would select Megatron's bundled attention."""
    pattern = args.hybrid_layer_pattern
    pattern = None if pattern is None else pattern.replace("D", "+")
    return argparse.Namespace(**vars(args) | {"hybrid_layer_pattern": pattern})
