"""Fixes of Megatron's multi-token prediction.

* megatron-core 0.19 shifts targets by unpadded ``cu_seqlens_q``, across padded documents.
* It divides losses by local token counts, which is wrong if context-parallel ranks' masks differ.
* megatron-core 0.20 tests for inference linears with ``isinstance``, which raises without
  transformer-engine.
"""

import dataclasses
import functools
import inspect
from types import SimpleNamespace

import torch

from megatron_dsa.patches import replace


@functools.cache
def shift_within_padded_documents() -> None:
    from megatron.core.transformer import multi_token_prediction

    @replace(multi_token_prediction, "_roll_tensor_packed_seq")
    def roll(original, tensor, shifts, dims, packed_seq_params, cp_group=None, return_sum=True):
        if shifts != -1 or dims not in (-1, tensor.dim() - 1):
            return original(tensor, shifts, dims, packed_seq_params, cp_group)
        ranks = 1 if cp_group is None else cp_group.size()
        lengths = packed_seq_params.cu_seqlens_q.diff()
        offsets = packed_seq_params.cu_seqlens_q_padded
        if offsets is None:
            offsets = packed_seq_params.cu_seqlens_q
        if ranks == 1:
            rolled = tensor.roll(-1, -1)
        else:
            moved = dataclasses.replace(packed_seq_params, cu_seqlens_q=offsets, total_tokens=None)
            rolled, _ = original(tensor, shifts, dims, moved, cp_group)
        rank = 0 if ranks == 1 else cp_group.rank()
        behind = _tokens_behind(tensor.shape[-1], offsets, lengths, ranks, rank)
        rolled = torch.where(behind > 0, rolled, torch.zeros_like(rolled))
        if tensor.dtype == torch.bool:
            rolled = torch.where(behind < 0, tensor, rolled)
        return rolled, rolled.sum() if return_sum else None  # Megatron 0.20 added ``return_sum``


def _tokens_behind(
    count: int, offsets: torch.Tensor, lengths: torch.Tensor, ranks: int, rank: int
) -> torch.Tensor:
    """Return int64 ``[count]``, the tokens after each local token in its document.

    It is negative for padding. ``offsets [n + 1]`` are cumulative padded lengths over all ranks,
    ``lengths [n]`` real lengths; tokens have zigzag order.
    """
    local = torch.arange(count, device=offsets.device)
    document = torch.bucketize(local * ranks, offsets, right=True) - 1
    document = document.clamp_max(lengths.numel() - 1)
    inside = local - offsets[document] // ranks
    if ranks > 1:
        chunk = offsets.diff()[document] // (2 * ranks)
        second = (2 * ranks - 1 - rank) * chunk + inside - chunk
        inside = torch.where(inside < chunk, rank * chunk + inside, second)
        inside = torch.where(local * ranks < offsets[-1], inside, lengths[document])
    return lengths[document] - 1 - inside


@functools.cache
def count_prediction_tokens_of_all_ranks() -> None:
    from megatron.core.models.gpt import gpt_model
    from megatron.core.models.hybrid import hybrid_model
    from megatron.core.transformer import multi_token_prediction

    original = multi_token_prediction.process_mtp_loss
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        group = bound.arguments["cp_group"]
        if group is None or group.size() == 1:
            return original(*args, **kwargs)
        return _process(SimpleNamespace(**bound.arguments))

    for module in (multi_token_prediction, gpt_model, hybrid_model):
        setattr(module, original.__name__, process)


def _process(call: SimpleNamespace) -> torch.Tensor:
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    config, group, labels = call.config, call.cp_group, call.labels

    def shift(tensor):
        return mtp.roll_tensor(
            tensor, shifts=-1, dims=-1, cp_group=group, packed_seq_params=call.packed_seq_params
        )[0]

    depths = config.mtp_num_layers
    hidden, *predictions = torch.chunk(call.hidden_states, 1 + depths, dim=0)
    if labels is None and call.input_ids is None:
        return hidden
    mask = call.loss_mask
    if mask is None:
        mask = torch.ones_like(call.input_ids if labels is None else labels)
    if labels is None:
        labels, mask = shift(call.input_ids), shift(mask)
    weight_of_output = call.output_weight
    if config.mtp_detach_heads:
        weight_of_output = (
            call.output_layer.weight if weight_of_output is None else weight_of_output
        ).detach()

    # One reduction sums all token counts.
    labels_of, masks = [], [mask]
    for _ in range(depths):
        labels = shift(labels)
        labels_of.append(labels)
        masks.append(shift(masks[-1]))
    counts = torch.stack([part.sum() for part in masks]).float()
    torch.distributed.all_reduce(counts, group=group)
    main_tokens, *tokens_of = counts.clamp(min=1)

    # Megatron averages gradients over ranks, or divides by the main loss's tokens.
    weight = main_tokens if config.calculate_per_token_loss else group.size()
    for depth, prediction in enumerate(predictions):
        labels, mask, tokens = labels_of[depth], masks[depth + 1], tokens_of[depth]
        logits, _ = call.output_layer(
            prediction,
            weight=weight_of_output,
            runtime_gather_output=call.runtime_gather_output,
        )
        if call.scale_logits_fn is not None:
            logits = call.scale_logits_fn(logits)
        losses = mask * call.compute_language_model_loss(labels, logits)
        if call.is_training:
            correct, total = mtp._compute_mtp_acceptance_counts(
                logits,
                labels,
                mask,
                call.output_layer,
                call.runtime_gather_output,
                call.tp_group,
            )
            mtp.MTPLossLoggingHelper.save_metrics_to_tracker(
                losses.sum() * group.size() / tokens,  # Megatron's log averages losses over ranks
                correct,
                total,
                depth,
                depths,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        factor = config.mtp_loss_scaling_factor / depths
        hidden = mtp.MTPLossAutoScaler.apply(hidden, factor * weight / tokens * losses)
    return hidden


@functools.cache
def build_prediction_blocks_from_specs() -> None:
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer.spec_utils import ModuleSpec

    original = gpt_model.MultiTokenPredictionBlock

    def build(*, spec, **others):
        block = spec.module if isinstance(spec, ModuleSpec) else original
        return block(spec=spec, **others)

    gpt_model.MultiTokenPredictionBlock = build


@functools.cache
def find_no_inference_linears_without_engine() -> None:
    from megatron.core.tensor_parallel import inference_layers
    from megatron.core.transformer import multi_token_prediction

    if not isinstance(inference_layers.InferenceColumnParallelLinear, type):
        multi_token_prediction.is_inference_column_parallel_linear = lambda _module: False
