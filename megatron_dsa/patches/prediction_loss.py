"""Loss of multi-token prediction under context parallelism.

megatron-core 0.19.2 divides each rank's loss by the rank's own count of unmasked tokens, for the
gradient and for the log. Ranks of context parallelism hold parts of the same sequences, so masks
that are not spread evenly gave other gradients and another log than one rank. Here counts are
summed over the ranks of the group.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def count_prediction_tokens_of_all_ranks() -> None:
    """Let models divide by the tokens of the context-parallel group; one rank sees no change."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction

    original = multi_token_prediction.process_mtp_loss

    @functools.wraps(original)
    def process(*args, **kwargs):
        group = kwargs.get("cp_group")
        return (original if group is None or group.size() == 1 else _process)(*args, **kwargs)

    for module in (multi_token_prediction, gpt_model):
        setattr(module, original.__name__, process)


def _process(
    hidden_states,
    labels,
    loss_mask,
    output_layer,
    output_weight,
    runtime_gather_output,
    is_training,
    compute_language_model_loss,
    config,
    cp_group,
    tp_group=None,
    packed_seq_params=None,
    scale_logits_fn=None,
    input_ids=None,
):
    """Attach the losses of all depths to the main model's hidden states, which are returned.

    Arguments as of Megatron's ``process_mtp_loss``; ``cp_group`` has more than one rank.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    def shift(tensor):
        return mtp.roll_tensor(
            tensor, shifts=-1, dims=-1, cp_group=cp_group, packed_seq_params=packed_seq_params
        )[0]

    depths = config.mtp_num_layers
    hidden, *predictions = torch.chunk(hidden_states, 1 + depths, dim=0)
    if labels is None and input_ids is None:
        return hidden
    mask = torch.ones_like(input_ids if labels is None else labels)
    if loss_mask is not None:
        mask = loss_mask
    if labels is None:
        labels, mask = shift(input_ids), shift(mask)
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()

    # The main loss's count, and each depth's: one sum over ranks.
    labels_of, masks = [], [mask]
    for _ in range(depths):
        labels = shift(labels)
        labels_of.append(labels)
        masks.append(shift(masks[-1]))
    counts = torch.stack([part.sum() for part in masks]).float()
    torch.distributed.all_reduce(counts, group=cp_group)
    main_tokens, *tokens_of = counts.clamp(min=1)

    # Without per-token loss Megatron averages gradients over these ranks, else divides their sum
    # by the main loss's tokens.
    weight = main_tokens if config.calculate_per_token_loss else cp_group.size()
    for depth, prediction in enumerate(predictions):
        labels, mask, tokens = labels_of[depth], masks[depth + 1], tokens_of[depth]
        logits, _ = output_layer(
            prediction, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        losses = mask * compute_language_model_loss(labels, logits)
        if is_training:
            correct, total = mtp._compute_mtp_acceptance_counts(
                logits, labels, mask, output_layer, runtime_gather_output, tp_group
            )
            mtp.MTPLossLoggingHelper.save_metrics_to_tracker(
                losses.sum() * cp_group.size() / tokens,  # the log averages over ranks
                correct,
                total,
                depth,
                depths,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
        factor = config.mtp_loss_scaling_factor / depths
        hidden = mtp.MTPLossAutoScaler.apply(hidden, factor * weight / tokens * losses)
    return hidden
