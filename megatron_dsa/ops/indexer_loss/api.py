"""Training the indexer on the sparse attention's own distribution (DeepSeek-V3.2, eq. 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dsa.dispatch import Policy, device_problem
from megatron_dsa.dispatch.support import Problem
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.numerics.scaling import scaled
from megatron_dsa.ops.indexer_loss.declaration import INDEXER_BACKWARD, SPARSE_LOSS
from megatron_dsa.ops.indexer_loss.inputs import IndexerGradients, SparseLossProblem
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.sparse_attention.declaration import BACKWARD
from megatron_dsa.sequence.layout import Layout


@dataclass(frozen=True)
class IndexerTraining:
    """What :func:`megatron_dsa.dsa_kernels.sparse_attention` needs to train the indexer.

    The teacher is the head sum of the attention probabilities, which the backward pass recomputes
    anyway; so the loss has its exact value there, and the indexer's tensors get their gradients
    from the attention's backward. Nothing of it exists in the forward pass.

    Attributes:
        inputs: the indexer's tensors; gradients flow to q, k and weights.
        layout: the layout that the selection was made with.
        weight: called in the backward pass; returns the factor on the gradient of the KL *sum* over
            query rows (coefficient, mean over rows, scale of auxiliary losses), a number or a
            scalar tensor on the device.
        record: called in the backward pass with the KL sum (detached scalar), for the log.
        head_group: process group over which heads are spread; the teacher is summed over it.
        selected_only: the teacher is a softmax over the selected keys alone, not what they get
            beside window and sink in hybrid attention.
    """

    inputs: IndexerInputs
    layout: Layout
    weight: Callable[[], torch.Tensor | float]
    record: Callable[[torch.Tensor], None] = lambda kl_sum: None
    head_group: object | None = None
    selected_only: bool = False

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that get gradients."""
        return self.inputs.q, self.inputs.k, self.inputs.weights

    def without_tensors(self) -> IndexerTraining:
        """Return the same without the indexer's tensors, to be kept until the backward."""
        return dataclasses.replace(self, inputs=IndexerInputs(None, None, None, self.inputs.relu))


def index_problem(inputs: IndexerInputs, layout: Layout, topk: int | None):
    """Describe a call of an indexer operation to dispatch."""
    dtype = inputs.q.dtype
    if inputs.key_scales is None:  # else it is fp8, and weights are fp32
        dtype = torch.promote_types(dtype, inputs.weights.dtype)
    return device_problem(
        inputs.q.device,
        dtype=dtype,
        heads=inputs.q.shape[1],
        qk_dim=inputs.q.shape[2],
        v_dim=0,
        topk=topk,
        packed=layout.real is not None,
        relu=inputs.relu,
    )


def needs_indexer_backward(problem: Problem, policy: Policy) -> bool:
    """Whether ``indexer_backward`` forms the gradients of the sparse loss; else it is not called.

    A loss that forms them itself does so, but for two cases: the user names another implementation
    for them, or torch's loss would take the place of a fused one.
    """
    loss = SPARSE_LOSS.choose(problem, policy).candidate
    if not loss.support.gradients:
        return True
    named = policy.named_for("indexer_backward")
    if named is not None:
        return named != loss.name
    return not loss.fused and INDEXER_BACKWARD.choose(problem, policy).candidate.fused


def needs_probabilities(problem: Problem, policy: Policy) -> bool:
    """Whether the teacher is left to ``sparse_attention_probabilities``.

    A backward that gives it along makes that operation superfluous (tilings that were never run
    leave it out in deterministic mode).

    Args:
        problem: that of the backward, with the teacher.
        policy: which implementations may run.
    """
    choice = BACKWARD.choose(problem, policy)
    if problem.deterministic and choice.untried:
        return True
    return not choice.candidate.support.gives_teacher


@dataclass(frozen=True)
class SelectedKeysLoss:
    """One evaluation of the sparse loss, its operations left to dispatch.

    Attributes:
        layout: the layout that the selection was made with.
        indices, topk_length, teacher: as in
            :class:`~megatron_dsa.ops.indexer_loss.inputs.SparseLossProblem`; the teacher is
            overwritten.
        policy: which implementations may run.
    """

    layout: Layout
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor
    policy: Policy

    def value(self, inputs: IndexerInputs) -> torch.Tensor:
        """Return the KL sum, without gradients."""
        problem, arguments = self._call(inputs)
        return SPARSE_LOSS.run(problem, self.policy, arguments).value

    def with_gradients(self, inputs: IndexerInputs) -> tuple[torch.Tensor, IndexerGradients]:
        """Return the KL sum and its gradients (fp32 where they accumulate)."""
        problem, arguments = self._call(inputs)
        separate = needs_indexer_backward(problem, self.policy)
        arguments = dataclasses.replace(arguments, want_gradients=not separate)
        loss = SPARSE_LOSS.run(problem, self.policy, arguments)
        gradients = loss.gradients
        if separate:
            gradients = INDEXER_BACKWARD.run(problem, self.policy, arguments, loss.student)
        return loss.value, gradients

    def differentiable(self, inputs: IndexerInputs) -> torch.Tensor:
        """Return the KL sum, differentiable in the indexer's tensors where they want gradients."""
        tensors = (inputs.q, inputs.k, inputs.weights)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return _SparseLoss.apply(*tensors, inputs.relu, self)
        return self.value(inputs)

    def _call(self, inputs: IndexerInputs):
        if inputs.q.dtype == torch.float16:
            # Gradients exist before the loss scale is applied; in fp16 they would underflow.
            inputs = IndexerInputs(
                inputs.q.float(), inputs.k.float(), inputs.weights.float(), inputs.relu
            )
        problem = index_problem(inputs, self.layout, self.indices.shape[1])
        return problem, SparseLossProblem(
            inputs,
            self.indices,
            self.topk_length,
            self.teacher,
            self.policy.workspace_bytes,
            want_gradients=False,
        )


class _SparseLoss(torch.autograd.Function):
    """The gradients are formed with the value and only multiplied by a number in the backward."""

    @staticmethod
    def forward(ctx, q, k, weights, relu, loss):
        value, gradients = loss.with_gradients(IndexerInputs(q, k, weights, relu))
        ctx.save_for_backward(
            *(g.to(x.dtype) for g, x in zip(gradients, (q, k, weights), strict=True))
        )
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue):
        return *(scaled(grad, dvalue) for grad in ctx.saved_tensors), None, None
