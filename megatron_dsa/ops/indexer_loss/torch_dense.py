"""Dense indexer loss in torch."""

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, bmm, mm, slices
from megatron_dsa.ops.indexer_loss.dense import TileBytes, dense_loss, gathered_bytes, take
from megatron_dsa.ops.indexer_loss.spec import (
    DenseLossInputs,
    ExpandedKeys,
    IndexerLoss,
    LatentKeys,
    TeacherKeys,
)
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.indexer_topk.torch import block_scores, head_products
from megatron_dsa.ops.layout.layout import Layout, Seen

#: Heads per pass: more heads are faster but need more memory.
HEADS_AT_ONCE = 8
#: Maximum tile edge: longer tiles waste work on the diagonal.
LONGEST_EDGE = 1024
_ALL = slice(None)


def dense(inputs: DenseLossInputs) -> IndexerLoss:
    return dense_loss(inputs, TorchTiles(inputs))


class TorchTiles:
    def __init__(self, inputs: DenseLossInputs):
        self.shape = tile_shape(inputs)
        self._keys, self._scale = inputs.indexer.k, inputs.softmax_scale

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        return take(self._keys, layout, slots)

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        return log_sum_exp(block_scores(x, _ALL, x.k, HEADS_AT_ONCE), _hidden(x, seen))

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        hidden = seen.columns(_width(keys)).logical_not_()
        return teacher_lse(q, keys, hidden, self._scale)

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        hidden = seen.columns(_width(keys)).logical_not_()
        teacher = teacher_tile(q, keys, lse, self._scale).masked_fill_(hidden, 0.0)
        return teacher.to(accumulation_dtype(self._keys.dtype))

    def loss(
        self, x: IndexerInputs, seen: Seen, teacher: torch.Tensor, lse: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = _hidden(x, seen)
        log_student = block_scores(x, _ALL, x.k, HEADS_AT_ONCE)
        log_student.sub_(lse[:, None]).masked_fill_(hidden, 0.0)
        value = torch.xlogy(teacher, teacher).addcmul_(teacher, log_student, value=-1).sum()
        if not gradient:
            return value, None
        return value, log_student.exp_().masked_fill_(hidden, 0.0).sub_(teacher)

    def backward(
        self, x: IndexerInputs, seen: Seen, dscores: torch.Tensor, dq: torch.Tensor,
        dweights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        narrow, dk = dscores.to(x.q.dtype), None
        for heads in slices(x.q.shape[1], HEADS_AT_ONCE):
            part, flat = _through_heads(x, heads, dscores, narrow)
            dweights[:, heads].add_(part)
            dq[:, heads].add_(mm(flat, x.k).view_as(dq[:, heads]))
            weighted = x.q[:, heads] * x.weights[:, heads, None]
            part = mm(flat.t(), weighted.to(x.q.dtype).flatten(0, 1))
            del flat
            dk = part if dk is None else dk.add_(part)
        assert dk is not None
        return dk

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        out.copy_(dq.mul_(x.weights[..., None]))


def _through_heads(x: IndexerInputs, heads: slice, dscores, narrow):
    products = head_products(x, _ALL, x.k, heads)
    dweights = torch.bmm(products, dscores[..., None]).squeeze(-1)
    dproducts = narrow[:, None].expand_as(products)
    if x.relu:
        dproducts = torch.where(products > 0, dproducts, 0.0)
    return dweights, dproducts.flatten(0, 1)


def _hidden(x: IndexerInputs, seen: Seen) -> torch.Tensor:
    return seen.columns(x.k.shape[0]).logical_not_()


def _width(keys: TeacherKeys) -> int:
    if isinstance(keys, torch.Tensor):
        return len(keys)
    return len(keys.k_pe if isinstance(keys, ExpandedKeys) else keys.latents)


def teacher_tile(
    q: torch.Tensor, keys: TeacherKeys, lse: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    total = None
    for heads in slices(q.shape[1], HEADS_AT_ONCE):
        shift = -lse[heads, :, None]
        part = _add_scaled(shift, _head_scores(q, keys, heads), softmax_scale).exp_().sum(0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def teacher_lse(
    q: torch.Tensor,
    keys: TeacherKeys,
    hidden: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    parts = (
        log_sum_exp(_head_scores(q, keys, heads), hidden, softmax_scale)
        for heads in slices(q.shape[1], HEADS_AT_ONCE)
    )
    return torch.cat(list(parts))


def log_sum_exp(scores: torch.Tensor, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return ``log(sum(exp(scale * scores)))`` over the last dim, ``-inf`` if all are hidden.

    Overwrites ``scores [..., r, w]``; ``hidden`` is bool ``[r, w]``, ``scale`` positive.
    """
    peak = scores.masked_fill_(hidden, float("-inf")).amax(-1, keepdim=True)
    peak = peak.masked_fill_(peak == float("-inf"), 0.0).mul_(scale)
    total = _add_scaled(-peak, scores, scale).exp_().sum(-1)
    return total.log_().add_(peak.squeeze(-1))


def _head_scores(q: torch.Tensor, keys: TeacherKeys, heads: slice) -> torch.Tensor:
    q = q[:, heads].transpose(0, 1)
    if not isinstance(keys, torch.Tensor):
        return bmm(q, keys.expanded(heads).permute(1, 2, 0))
    if keys.shape[1] == 1:
        # Fold heads into tokens: ``bmm`` might copy the shared keys per head.
        return mm(q.flatten(0, 1), keys[:, 0].t()).unflatten(0, q.shape[:2])
    return bmm(q, keys[:, heads].permute(1, 2, 0))


def _add_scaled(shift: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.add(shift, scores, alpha=scale, out=scores)


def tile_shape(inputs: DenseLossInputs) -> tuple[int, int]:
    return tile_bytes(inputs).fitting_shape(inputs.workspace_bytes, LONGEST_EDGE)


def tile_bytes(inputs: DenseLossInputs) -> TileBytes:
    x, q, k = inputs.indexer, inputs.q, inputs.k
    gathers = inputs.layout.key_indices is not None
    (index_heads, index_dim), (all_heads, dim) = x.q.shape[1:], q.shape[1:]
    some_index_heads = min(HEADS_AT_ONCE, index_heads)
    heads = min(HEADS_AT_ONCE, all_heads)
    index_item, item = x.q.element_size(), q.element_size()
    acc, index_copy = _accumulator(x.q)
    teacher_acc, copy = _accumulator(q)
    widest = max(acc, teacher_acc)
    # Bytes of the largest products: teacher, two student products, or student with mask and
    # gradient.
    products = max(
        heads * teacher_acc,
        2 * some_index_heads * acc,
        some_index_heads * (acc + 1 + index_item + index_copy),
    )
    # A query-key pair also needs masks, two teachers, scores and score gradients.
    pair = products + 4 + 4 * widest + index_item
    token = index_heads * index_dim * acc
    token += some_index_heads * index_dim * (2 * index_item + 2 * acc + index_copy)
    token += heads * dim * (item + copy) + 6 * all_heads * teacher_acc
    slot = index_dim * (index_item * gathers + index_copy + acc)
    fixed = 0
    if isinstance(k, ExpandedKeys):
        slot += gathered_bytes(k) * gathers + heads * dim * item
    elif isinstance(k, LatentKeys):
        nope = k.w_uk.shape[1]
        slot += k.latents.shape[1] * item * gathers + heads * (nope + dim) * item
        fixed = 0 if k.w_uk.is_contiguous() else heads * nope * k.w_uk.shape[2] * item
    else:
        slot += k.shape[1] * dim * item * gathers
    slot += min(heads, all_heads) * dim * copy
    return TileBytes(pair, token, slot, fixed)


def _accumulator(x: torch.Tensor) -> tuple[int, int]:
    acc = accumulation_dtype(x.dtype).itemsize
    return acc, acc if x.element_size() < acc and not x.is_cuda else 0
