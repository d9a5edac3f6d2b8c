"""Float64 values, gradients and comparison of indexer losses."""

from dataclasses import dataclass

import torch

from megatron_dsa.ops.indexer_loss.spec import DenseLossInputs, dense_teacher, kl_sum
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, index_scores
from megatron_dsa.testing.cases import Lists, chunks, visible_keys
from megatron_dsa.testing.comparison import Comparison


@dataclass(frozen=True)
class ExpectedLoss:
    """Float64 loss (a scalar) and gradients."""

    loss: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor

    def compare(self, found: Comparison, loss, dq, dk, dweights) -> None:
        found.compare("loss", loss, self.loss)
        found.compare("dq", dq, self.q)
        found.compare("dk", dk, self.k)
        found.compare("dweights", dweights, self.weights)


def random_teacher(indices: torch.Tensor, seed: int = 7) -> torch.Tensor:
    """Draw a positive teacher ``[Sq, K]``, not normalised."""
    generator = torch.Generator(indices.device).manual_seed(seed)
    return torch.randn(indices.shape, generator=generator, device=indices.device).exp_()


def expected_loss(inputs: IndexerInputs, lists: Lists, teacher: torch.Tensor) -> ExpectedLoss:
    k = inputs.k.detach().double().requires_grad_()
    tokens, heads, dim = inputs.q.shape
    indices, valid = lists.indices, lists.valid
    loss = torch.zeros((), dtype=torch.float64, device=k.device)
    dq, dweights = [], []
    for chunk in chunks(tokens, 8 * indices.shape[1] * (3 * dim + 5 * heads)):
        q, weights = _leaves(inputs.q[chunk], inputs.weights[chunk])
        # Zeros replace unselected keys, which are NaN.
        table = torch.cat([k, k.new_zeros(1, dim)])
        keys = table[torch.where(valid[chunk], indices[chunk], len(k)).long()]
        products = torch.einsum("qhd,qkd->qhk", q, keys)
        products = products.relu() if inputs.relu else products
        scores = torch.einsum("qh,qhk->qk", weights, products)
        value = kl_sum(scores, teacher[chunk].double(), valid[chunk])
        value.backward()
        loss += value.detach()
        assert q.grad is not None and weights.grad is not None
        dq.append(q.grad)
        dweights.append(weights.grad)
    assert k.grad is not None
    return ExpectedLoss(loss, torch.cat(dq), k.grad, torch.cat(dweights))


def expected_dense_loss(inputs: DenseLossInputs) -> ExpectedLoss:
    x, visible = inputs.indexer, visible_keys(inputs.layout)
    q, k, weights = _leaves(x.q, x.k, x.weights)
    value = kl_sum(index_scores(q, k, weights, x.relu), _dense_teacher(inputs, visible), visible)
    value.backward()
    assert q.grad is not None and k.grad is not None and weights.grad is not None
    return ExpectedLoss(value.detach(), q.grad, k.grad, weights.grad)


def _dense_teacher(inputs: DenseLossInputs, visible: torch.Tensor) -> torch.Tensor:
    q, total = inputs.q.detach().double(), torch.zeros(visible.shape, dtype=torch.float64)
    total = total.to(visible.device)
    for head in range(q.shape[1]):
        one = slice(head, head + 1)
        if not isinstance(inputs.k, torch.Tensor):
            k = inputs.k.expanded(one)  # rounded as keys from the projection are
        else:
            k = inputs.k if inputs.k.shape[1] == 1 else inputs.k[:, one]
        k = k.detach().double()
        if inputs.other_lse is None:
            total += dense_teacher(q[:, one], k, visible, inputs.softmax_scale)
            continue
        logits = torch.einsum("qd,kd->qk", q[:, head], k[:, 0]) * inputs.softmax_scale
        logits = logits.masked_fill(~visible, float("-inf"))
        mass = torch.logaddexp(logits.logsumexp(-1), inputs.other_lse[:, head].double())
        total += torch.where(visible, (logits - mass[:, None]).exp(), 0.0)
    return total


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]
