"""How many microbatches a pipeline rank keeps at once, by Megatron's own schedules."""

from collections.abc import Sequence


def most_kept(args, kept: Sequence[int], extra: Sequence[int]) -> int:
    """Return the most bytes that activations take at any time of an iteration on this rank.

    Walks through the order of forward and backward passes: first the warm-up's forward passes, then
    one forward and one backward in turn.

    Args:
        args: validated arguments; Megatron's parallel state tells the pipeline rank.
        kept: per model chunk, bytes alive between its forward and backward pass of a microbatch.
        extra: per model chunk, bytes that either pass takes at most besides.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    count, chunks = get_num_microbatches(), len(kept)
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    warmup = get_pp_rank_microbatches(count, chunks, group)[2]
    order = [chunk for _, chunk in get_schedule_table(count, chunks, group)]
    forward, backward = iter(order), iter([chunks - 1 - chunk for chunk in order])
    steps = [("forward", next(forward)) for _ in range(warmup)]
    for chunk in forward:
        steps += [("forward", chunk), ("backward", next(backward))]
    steps += [("backward", chunk) for chunk in backward]
    alive = most = 0
    for step, chunk in steps:
        most = max(most, alive + extra[chunk] + (kept[chunk] if step == "forward" else 0))
        alive += kept[chunk] if step == "forward" else -kept[chunk]
    return most
