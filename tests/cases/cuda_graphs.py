"""A substitute for CUDA graphs on the CPU: a traced step, run again on other inputs.

Like a capture, tracing records only operations on tensors. Python runs once; reading a number from
a tensor is an error; existing tensors are read in place. Unlike a capture, anything independent of
the inputs is computed once.
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
    """Skip host-only work of the CPU: checks of values, reading of a factor."""

    def unchecked(*_args):
        return None

    with contextlib.ExitStack() as stack:
        for module in (checks, api):
            stack.enter_context(mock.patch.object(module, "require_on_device", unchecked))
        stack.enter_context(mock.patch.object(Factor, "on_device", lambda factor: factor))
        yield


def step_of(module, make_params=lambda lengths: None):
    """Return a training step of an attention or a layer as a function of tensors only.

    It takes hidden states, the output's gradient, loss scale, log buffer and cumulative document
    lengths; returns output, gradients of hidden states and trained parameters, and the log buffer
    with the step added.
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
    """Trace ``step(*inputs)``; return a function that runs its operations on other inputs.

    Raises:
        RuntimeError: the step reads a number from a tensor.
    """
    with without_host_numbers():
        step(*inputs)  # builds tables
        return torch.no_grad()(make_fx(step)(*inputs))
