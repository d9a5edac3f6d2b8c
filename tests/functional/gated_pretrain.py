"""The entry point for layers G without flash-linear-attention, whose kernels need a GPU.

With ``--deterministic-mode`` Megatron uses torch code, except for a norm that is replaced here.
"""

import torch
from megatron.core.ssm.gated_delta_net import common

from megatron_dsa import pretrain


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


if __name__ == "__main__":
    common.HAVE_FLA, common.l2norm = True, l2norm
    pretrain.main()
