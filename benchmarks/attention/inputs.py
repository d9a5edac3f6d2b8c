"""Inputs, calls and checks of sparse attention's operations."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.attention import raw
from benchmarks.attention.lists import make_indices
from benchmarks.attention.shapes import OPERATIONS, PRESETS
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.testing.cases import Lists, Shape
from megatron_dsa.testing.comparison import Comparison, comparison_at_model_shapes
from megatron_dsa.testing.sparse_attention import AttentionReference, attention_case


@dataclass(frozen=True)
class Case:
    """Inputs shared by all operations.

    Attributes:
        preset: key of :data:`~benchmarks.attention.shapes.PRESETS`.
        queries: the last of the keys' positions; skv: keys.
        distribution: of the selected keys, see :func:`~benchmarks.attention.lists.make_indices`.
        workspace_mib: budget of torch implementations.
    """

    preset: str
    queries: int
    skv: int
    distribution: str
    workspace_mib: int = 256


class Inputs:
    """The tensors of one case, in bf16, the same for every implementation.

    Inputs of a backward come from the torch implementation, independent of any forward kernel.
    """

    def __init__(self, case: Case, device: torch.device):
        p = PRESETS[case.preset]
        indices = make_indices(case.distribution, case.queries, case.skv, p.topk, device)
        shape = Shape(p.heads, p.qk_dim, p.v_dim, 1, 1, p.topk, case.skv, case.queries, sink=p.sink)
        self.case = dataclasses.replace(
            attention_case(shape, Lists(indices, None, case.skv), p.softmax_scale),
            workspace_bytes=case.workspace_mib * 2**20,
        )
        self.op_call = describe_call(
            device, dtype=shape.dtype, heads=p.heads, qk_dim=p.qk_dim, v_dim=p.v_dim, topk=p.topk,
            packed=False, sink=p.sink,
        )  # fmt: skip

    @cached_property
    def _forward(self) -> tuple:
        return self.call("forward", "torch")()

    @cached_property
    def _reference(self) -> AttentionReference:
        return AttentionReference(self.case)

    def call(self, operation: str, name: str):
        """Return a function without arguments that runs the operation once.

        Raises:
            ImplementationError: the implementation cannot run these inputs.
        """
        dispatched = DISPATCHED[OPERATIONS[operation]]
        implementation = raw.ADAPTER if name == raw.WAY else name
        (candidate,) = (c for c in dispatched.candidates if c.name == implementation)
        if reason := candidate.reason(self.op_call):
            raise ImplementationError(reason)
        if name == raw.WAY:
            return raw.forward(self.case.inputs())
        policy = Policy(
            workspace_bytes=self.case.workspace_bytes, named=((OPERATIONS[operation], name),)
        )
        tensors: tuple = ()
        if operation != "forward":
            out, lse = self._forward[:2]
            tensors = (lse,) if operation == "teacher" else (out, lse, self.case.dout)
        return lambda: dispatched.run(self.op_call, policy, self.case.inputs(), *tensors)

    def compare(self, operation: str, name: str, result) -> Comparison:
        found = comparison_at_model_shapes(self.case.q.dtype)
        if name == raw.WAY:
            result = raw.as_ours(result, self.case.q.shape[1])
        if operation == "teacher":
            self._reference.teacher(found, result)
        else:
            outputs = result[: 2 if operation == "forward" else 3]
            getattr(self._reference, operation)(found, *outputs)
        return found
