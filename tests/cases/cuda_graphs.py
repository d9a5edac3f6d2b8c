"""A stand-in for CUDA graphs on the CPU: a traced step that is run again on other inputs.

Tracing is like a capture: only what is computed on tensors of the inputs happens again. Python runs
once; a number that is read from a tensor is an error; a tensor that was there before is read where
it lies. (It is unlike one in that what depends on no input is computed once.)
"""

import contextlib
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.ops.common import checks
from megatron_dsa.ops.common.scaling import Factor
from megatron_dsa.ops.indexer_topk import api


@contextlib.contextmanager
def without_host_numbers():
    """Leave out what only the CPU does: values are checked, and a factor is read, on the host."""

    def unchecked(*_args):
        return None

    with contextlib.ExitStack() as stack:
        for module in (checks, api):
            stack.enter_context(mock.patch.object(module, "require_on_device", unchecked))
        stack.enter_context(mock.patch.object(Factor, "on_device", lambda factor: factor))
        yield


def step_of(module, make_params=lambda lengths: None):
    """Return a training step of an attention or a layer, as a function of tensors alone.

    It takes hidden states, the gradient of the output, the loss scale, the log's buffer, and the
    cumulative lengths of documents; and returns output, gradients of the hidden states and of all
    trained parameters, and the log's buffer with the figures of the step added.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]

    def step(x, gradient, scale, sums, lengths):
        x = x.detach().requires_grad_()
        module.config.experimental_attention_variant_loss_scale_func.value = scale
        sums = sums.clone()
        with mock.patch.object(IndexerLog._state, "sums", sums):
            out = module(x, attention_mask=None, packed_seq_params=make_params(lengths))[0]
            found = torch.autograd.grad(out, [x, *parameters], gradient, allow_unused=True)
        return out.detach(), *(g for g in found if g is not None), sums

    return step


def traced(step, inputs):
    """Return what runs the operations of ``step(*inputs)`` again on other inputs.

    Raises:
        RuntimeError: the step reads a number from a tensor.
    """
    with without_host_numbers():
        step(*inputs)  # tables are made in a first step
        return torch.no_grad()(make_fx(step)(*inputs))
