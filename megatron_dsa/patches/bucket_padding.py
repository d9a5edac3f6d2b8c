"""Optimizer states with ``--dist-ckpt-optim-fully-reshardable``.

megatron-core 0.19 gathers states without the padding between buckets, but cuts them at padded
offsets.
"""

import functools
from unittest import mock

import torch

from megatron_dsa.patches import replace


@functools.cache
def repair_offsets_of_states() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @replace(DistributedOptimizer, "sharded_param_state_fully_reshardable")
    def sharded_param_state_fully_reshardable(original, self, *args, **kwargs):
        gather = self.get_parameter_state_dp_zero

        def gather_with_padding(*gather_args, **gather_kwargs):
            state = gather(*gather_args, **gather_kwargs)
            if state is not None:
                for index, buffer in enumerate(self.buffers):
                    for tensors in state[index].values():
                        _insert_padding(tensors, buffer)
            return state

        with mock.patch.object(self, "get_parameter_state_dp_zero", gather_with_padding):
            return original(self, *args, **kwargs)


def _insert_padding(tensors: dict, buffer) -> None:
    """Move buckets in ``tensors`` to their padded offsets, in place."""
    for key, gathered in tensors.items():
        if not isinstance(gathered, torch.Tensor) or gathered.numel() == buffer.numel:
            continue
        padded, offset = gathered.new_zeros(buffer.numel), 0
        for bucket, (start, _) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
            size = bucket.numel_unpadded
            padded[start : start + size] = gathered[offset : offset + size]
            offset += size
        tensors[key] = padded
