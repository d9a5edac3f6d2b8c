"""Inputs, calls and checks of masked dense attention."""

import dataclasses
from functools import cached_property

import torch

from benchmarks.attention.lists import causal_lists
from benchmarks.layer.peers import ATTENTIONS
from benchmarks.masked.shapes import FLASH4, OPERATIONS, PEERS, Case
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.dense_attention.blocks import BLOCK_KERNELS
from megatron_dsa.ops.dense_attention.sequences import Dense
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import OpCall, Policy, describe_call
from megatron_dsa.ops.masked_attention import torch as in_torch
from megatron_dsa.ops.masked_attention.spec import KeyBitsInputs, MaskedAttentionInputs
from megatron_dsa.testing.cases import Lists, sampled_tokens
from megatron_dsa.testing.comparison import Comparison, comparison_at_model_shapes
from megatron_dsa.testing.masked_attention import MaskedDims, MaskedReference, masked_case

#: Tokens of a peer that are compared with float64.
PEER_TOKENS = 16


def require_cuda(device: torch.device) -> None:
    """Raise :class:`ImplementationError` without cuDNN."""
    if device.type != "cuda":
        raise ImplementationError("cuDNN's attention needs a GPU")


def require_flash4(call: OpCall) -> None:
    """Raise :class:`ImplementationError` if FlashAttention 4 cannot run ``call``."""
    (candidate,) = (c for c in DENSE_ATTENTION.candidates if c.name == "flash4")
    if reason := candidate.reason(call):
        raise ImplementationError(reason)


class Inputs:
    """The tensors of one case, in bf16, the same for every implementation.

    Backward and teacher get ``out`` and ``lse`` from the float64 reference, rounded. Tiles of the
    bits are found again in each call.
    """

    def __init__(self, case: Case, device: torch.device):
        lists = causal_lists(case.distribution, case.tokens, case.topk, device)
        dims = MaskedDims(case.heads, case.nope, case.rope, case.v)
        self.case = drawn = masked_case(dims, lists)
        workspace = case.workspace_mib * 2**20
        bits = in_torch.key_bits(KeyBitsInputs(lists.indices, lists.length, case.tokens, workspace))
        self.inputs = MaskedAttentionInputs(
            drawn.q, drawn.kv, drawn.k_pe, bits, case.v, drawn.softmax_scale, workspace
        )
        self.op_call = describe_call(
            device, dtype=drawn.q.dtype, heads=case.heads, qk_dim=case.nope + case.rope,
            v_dim=case.v, rope_dim=case.rope, topk=case.topk,
        )  # fmt: skip

    @cached_property
    def _reference(self) -> MaskedReference:
        return MaskedReference(self.case)

    def call(self, operation: str, name: str):
        """Return a function without arguments that runs the operation once.

        Raises:
            ImplementationError: the implementation cannot run these inputs.
        """
        if name in PEERS:
            return self._peer(operation, name)
        dispatched = DISPATCHED[OPERATIONS[operation]]
        (candidate,) = (c for c in dispatched.candidates if c.name == name)
        if reason := candidate.reason(self.op_call):
            raise ImplementationError(reason)
        named = ((OPERATIONS[operation], name),)
        policy = Policy(workspace_bytes=self.inputs.workspace_bytes, named=named)
        more: tuple = ()
        if operation != "forward":
            expected, drawn = self._reference.expected, self.case
            out, lse = expected.out.to(drawn.q.dtype), expected.lse.float()
            width = drawn.lists.indices.shape[1]
            more = (out, lse, drawn.dout)
            if operation == "teacher":
                more = (lse, width, slice(0, len(drawn.q)))
        return lambda: dispatched.run(
            self.op_call, policy, dataclasses.replace(self.inputs, kept={}), *more
        )

    def _peer(self, operation: str, name: str):
        if name == FLASH4:
            require_flash4(self.op_call)
        else:
            require_cuda(self.case.q.device)
        kv, nope = self.case.kv, self.inputs.nope_dim
        k_pe = self.case.k_pe[:, None].expand(-1, kv.shape[1], -1)
        k, v = torch.cat([kv[..., :nope], k_pe], -1), kv[..., nope:].contiguous()
        tensors, scale = (self.case.q, k, v), self.case.softmax_scale
        if name == FLASH4:
            block, more = BLOCK_KERNELS["flash4"], (True, scale, Dense(1))
            if operation == "forward":
                return lambda: block.forward(*tensors, *more)[0]
            saved = block.forward(*tensors, *more)
            return lambda: block.backward(self.case.dout, *tensors, *saved, *more)
        if operation == "forward":
            return lambda: ATTENTIONS["cudnn"](*tensors, scale)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = ATTENTIONS["cudnn"](*leaves, scale)
        return lambda: torch.autograd.grad(out, leaves, self.case.dout, retain_graph=True)

    def compare(self, operation: str, name: str, result) -> Comparison:
        """Compare a result of ``operation`` with float64; of a peer only ``out`` or ``dq`` of some
        tokens.
        """
        found = comparison_at_model_shapes(self.case.q.dtype)
        if name in PEERS:
            self._compare_peer(found, operation, result)
        elif operation == "teacher":
            self._reference.listed_keys(found, result)
        else:
            getattr(self._reference, operation)(found, *result)
        return found

    def _compare_peer(self, found: Comparison, operation: str, result) -> None:
        tokens = sampled_tokens(len(self.case.q), PEER_TOKENS, self.case.q.device)
        visible = Lists(
            torch.arange(len(self.case.kv), device=tokens.device).expand(len(tokens), -1).int(),
            tokens.int() + 1, len(self.case.kv),
        )  # fmt: skip
        some = dataclasses.replace(
            self.case, q=self.case.q[tokens], dout=self.case.dout[tokens], lists=visible
        )
        expected = MaskedReference(some).expected
        if operation == "forward":
            found.compare("out", result[tokens], expected.out)
        else:
            found.compare("dq", result[0][tokens], expected.dq)
