"""The dense indexer loss in torch, which runs everywhere."""

import dataclasses

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm, slices
from megatron_dsa.ops.indexer_loss.dense import dense_loss, take
from megatron_dsa.ops.indexer_loss.inputs import DenseLossInputs, ExpandedKeys, TeacherKeys
from megatron_dsa.ops.indexer_loss.teacher import log_sum_exp, teacher_lse, teacher_tile
from megatron_dsa.ops.indexer_loss.tiles import HEADS_AT_ONCE, tile_shape
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.indexer_topk.torch import block_scores, head_products
from megatron_dsa.ops.layout.blocks import Seen
from megatron_dsa.ops.layout.layout import Layout

_ALL = slice(None)


def dense(inputs: DenseLossInputs) -> torch.Tensor:
    """Return the KL sum over all visible keys (scalar), differentiable in the indexer's inputs."""
    x = inputs.indexer
    if x.q.dtype == torch.float16:
        # Gradients exist before the loss scale is applied; in fp16 they would underflow.
        x = IndexerInputs(x.q.float(), x.k.float(), x.weights.float(), x.relu)
        inputs = dataclasses.replace(inputs, indexer=x)
    return dense_loss(inputs, TorchTiles)


class TorchTiles:
    """:class:`~.dense.TileFunctions` of one inputs; teachers and gradients are ``[r, w]``."""

    def __init__(self, inputs: DenseLossInputs):
        self.shape = tile_shape(inputs)
        self._keys, self._scale = inputs.indexer.k.detach(), inputs.softmax_scale

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        """A view where it can be."""
        return take(self._keys, layout, slots)

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        """See :class:`~.dense.TileFunctions`."""
        return log_sum_exp(block_scores(x, _ALL, x.k, HEADS_AT_ONCE), _hidden(x, seen))

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        """See :class:`~.dense.TileFunctions`."""
        hidden = seen.columns(_width(keys)).logical_not_()
        return teacher_lse(q, keys, hidden, self._scale)

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        """In the accumulation dtype of the index queries."""
        hidden = seen.columns(_width(keys)).logical_not_()
        teacher = teacher_tile(q, keys, lse, self._scale).masked_fill_(hidden, 0.0)
        return teacher.to(accumulation_dtype(self._keys.dtype))

    def loss(
        self, x: IndexerInputs, seen: Seen, teacher: torch.Tensor, lse: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`~.dense.TileFunctions`."""
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
        """See :class:`~.dense.TileFunctions`; a few heads at a time."""
        narrow, dk = dscores.to(x.q.dtype), None
        for heads in slices(x.q.shape[1], HEADS_AT_ONCE):
            part, flat = _through_heads(x, heads, dscores, narrow)
            dweights[:, heads].add_(part)
            dq[:, heads].add_(mm(flat, x.k).view_as(dq[:, heads]))
            weighted = x.q[:, heads] * x.weights[:, heads, None]
            part = mm(flat.t(), weighted.to(x.q.dtype).flatten(0, 1))
            del flat  # before the products of the next heads exist
            dk = part if dk is None else dk.add_(part)
        assert dk is not None
        return dk

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        """The factor of the queries' gradient."""
        out.copy_(dq.mul_(x.weights[..., None]))


def _through_heads(x: IndexerInputs, heads: slice, dscores, narrow):
    """Return the gradient on the weights of some heads ``[r, h]`` and, for products with 16-bit
    operands, that on the products of these heads ``[r * h, w]``, but for the weights.
    """
    products = head_products(x, _ALL, x.k, heads)
    dweights = torch.bmm(products, dscores[..., None]).squeeze(-1)
    dproducts = narrow[:, None].expand_as(products)
    if x.relu:
        # Written once in the narrow type: no mask, product and cast in the wide one.
        dproducts = torch.where(products > 0, dproducts, 0.0)
    return dweights, dproducts.flatten(0, 1)


def _hidden(x: IndexerInputs, seen: Seen) -> torch.Tensor:
    return seen.columns(x.k.shape[0]).logical_not_()


def _width(keys: TeacherKeys) -> int:
    if isinstance(keys, torch.Tensor):
        return len(keys)
    return len(keys.k_pe if isinstance(keys, ExpandedKeys) else keys.latents)
