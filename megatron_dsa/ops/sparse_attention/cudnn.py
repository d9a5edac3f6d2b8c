"""Sparse attention backward and the indexer's teacher through cuDNN's front end.

On Hopper, the unrounded fp32 key gradient is read from the workspace.
"""

import logging

import torch

from megatron_dsa.ops.common.arithmetic import lengths
from megatron_dsa.ops.dispatch.packages import CUDNN
from megatron_dsa.ops.hopper.sums import in_column_order
from megatron_dsa.ops.padding import masked_indices, padded_heads, widened, with_heads
from megatron_dsa.ops.sparse_attention.lists import ascending_lists, caller_lists, sorting_pays
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs

logger = logging.getLogger(__name__)

#: First cuDNN version whose workspace :func:`_accumulator` can read.
_WORKSPACE_SINCE = (1, 32)
_TILE = 64
_accumulator_fits: bool | None = None
_workspace_bytes: dict[tuple, int] = {}


def backward(
    inputs: SparseAttentionInputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    from cudnn import DSA

    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    lists = ascending_lists if sorting_pays(inputs) else caller_lists
    indices, length = lists(inputs)
    sink = inputs.sink
    if sink is None:
        sink = torch.full((q.shape[1],), float("-inf"), dtype=torch.float32, device=q.device)
    arguments = (
        q,
        kv,
        out.contiguous(),
        dout.to(q.dtype).contiguous(),
        torch.where(lse == float("-inf"), float("inf"), lse),
        sink.float().contiguous(),
        widened(indices, -1),
    )
    workspace = _workspace(DSA, arguments, length)
    result = DSA.sparse_attention_backward_wrapper(
        *arguments,
        softmax_scale=inputs.softmax_scale,
        topk_length=length,
        workspace=workspace,
    )
    dkv = _wide(result["dkv"], workspace)
    return result["dq"], dkv, None if inputs.sink is None else result["d_sink"], None


def _workspace(DSA, arguments, length) -> torch.Tensor | None:
    q = arguments[0]
    hopper = torch.cuda.get_device_capability(q.device) == (9, 0)
    if not hopper or CUDNN.version() < _WORKSPACE_SINCE or _accumulator_fits is False:
        return None
    shapes = tuple(x.shape for x in arguments)
    if shapes not in _workspace_bytes:
        names = ("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs")
        samples = {f"sample_{name}": x for name, x in zip(names, arguments, strict=True)}
        plan = DSA.SparseAttentionBackward(**samples, sample_topk_length=length)
        plan.check_support()
        _workspace_bytes[shapes] = plan.scratch_workspace_bytes()
    return torch.empty(_workspace_bytes[shapes], dtype=torch.uint8, device=q.device)


def _wide(dkv: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
    global _accumulator_fits
    if workspace is None or _accumulator_fits is False:
        return dkv.float()
    wide = _accumulator(workspace, *dkv.shape)
    if _accumulator_fits is None:
        _accumulator_fits = torch.equal(wide.to(dkv.dtype), dkv)
        if not _accumulator_fits:
            logger.warning(
                "megatron_dsa: the workspace of this cuDNN front end is laid out differently; its "
                "key gradients are used as returned, rounded to %s before the sum over ranks",
                dkv.dtype,
            )
            return dkv.float()
    return wide


def _accumulator(workspace: torch.Tensor, keys: int, dim: int) -> torch.Tensor:
    """Return the fp32 key gradient from the end of cuDNN's workspace."""
    padded_keys = -(-keys // _TILE) * _TILE
    size = padded_keys * dim * 4
    accumulator = workspace[workspace.numel() - size :].view(torch.float32)
    return in_column_order(accumulator.view(padded_keys, dim)[:keys])


def probabilities(inputs: SparseAttentionInputs, lse: torch.Tensor) -> torch.Tensor:
    """Return fp32 ``p_sum [Sq, K]`` without cuDNN's normalisation, so that ranks can add sums.

    A head's probabilities sum to 1, or to ``exp(lse - total)`` with a sink.
    """
    from cudnn import DSA

    heads = padded_heads(inputs.q.shape[1], (8, 16, 32, 64))
    valid, indices = masked_indices(inputs.indices, inputs.topk_length, inputs.kv.shape[0])
    total = lse
    if inputs.sink is not None:
        total = torch.logaddexp(lse, inputs.sink.float().expand_as(lse))
    empty = lse == float("-inf")
    mass = torch.where(empty, 0.0, torch.exp(lse - torch.where(empty, 0.0, total))).sum(-1)
    # With an lse of inf, queries without keys get probabilities of 0.
    total = torch.where(empty, float("inf"), total)
    target = DSA.sparse_attn_score_recompute_wrapper(
        with_heads(inputs.q, heads, -2)[None],
        inputs.kv.contiguous()[None],
        with_heads(total, heads, -1, float("inf"))[None],
        indices[None],
        inputs.softmax_scale,
        qhead_per_kv_head=heads,
        topk_length=lengths(inputs.indices, inputs.topk_length, inputs.length_in_range)[None],
        topk_indices_global=False,
    )["target"][0, :, : valid.shape[1]]
    # cuDNN leaves invalid entries undefined.
    return torch.where(valid, target * mass[:, None], 0.0)
