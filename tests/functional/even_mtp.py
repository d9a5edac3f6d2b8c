"""The training entry point, with MTP's loss averaged over the tokens of all context-parallel ranks.

Megatron divides each rank's sum by the rank's own number of tokens and averages the ranks. The
numbers differ (the last position of a sequence has nothing to predict), so its MTP gradients are
about 1% off those of one process, whatever the attention does. Here ranks divide by the same
number, so that a test sees what attention contributes.
"""

import torch

from megatron_dsa import pretrain
from megatron_dsa.patches import cpu_host


def main() -> None:
    """Patch Megatron and train."""
    if cpu_host.needed():
        cpu_host.hide_transformer_engine()  # before Megatron is imported
    from megatron.core.transformer import multi_token_prediction

    roll = multi_token_prediction.roll_tensor

    def roll_and_count_alike(*args, cp_group=None, **kwargs):
        rolled, count = roll(*args, cp_group=cp_group, **kwargs)
        if cp_group is not None and cp_group.size() > 1:
            count = count.float()
            torch.distributed.all_reduce(count, group=cp_group)
            count /= cp_group.size()
        return rolled, count

    multi_token_prediction.roll_tensor = roll_and_count_alike
    pretrain.main()


if __name__ == "__main__":
    main()
