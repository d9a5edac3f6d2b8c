"""The inputs of the sparse operations, and calls of their implementations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.attention.lists import make_indices
from benchmarks.attention.shapes import OPERATIONS, PRESETS
from megatron_dsa.dispatch import Policy, describe_call
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.ops.sparse_attention.declaration import FORWARD
from megatron_dsa.ops.sparse_attention.inputs import SparseAttentionInputs


@dataclass(frozen=True)
class Case:
    """Inputs that all operations share.

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

    ``out``, ``lse`` and ``p_sum`` come from the torch implementation, so that a backward is not
    measured on (or blamed for) what some forward kernel made.
    """

    def __init__(self, case: Case, device: torch.device, seed: int = 0):
        p = PRESETS[case.preset]
        self.preset, self.v_dim, self.softmax_scale = p, p.v_dim, p.softmax_scale
        self.workspace_bytes = case.workspace_mib * 2**20
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

        self.q = normal(case.queries, p.heads, p.qk_dim)
        self.kv = normal(case.skv, p.qk_dim)
        self.dout = normal(case.queries, p.heads, p.v_dim)
        self.sink = normal(p.heads, dtype=torch.float32) if p.sink else None
        self.indices = make_indices(case.distribution, case.queries, case.skv, p.topk, device, seed)
        self.op_call = describe_call(
            device,
            dtype=self.q.dtype,
            heads=p.heads,
            qk_dim=p.qk_dim,
            v_dim=p.v_dim,
            topk=p.topk,
            packed=False,
            sink=p.sink,
        )

    def sparse_inputs(self, want_p_sum: bool = False) -> SparseAttentionInputs:
        return SparseAttentionInputs(
            self.q, self.kv, self.indices, self.v_dim, self.softmax_scale, None, self.sink,
            self.workspace_bytes, want_p_sum,
        )  # fmt: skip

    @cached_property
    def _forward(self):
        policy = self.policy("forward", "torch")
        return FORWARD.run(self.op_call, policy, self.sparse_inputs(want_p_sum=True))

    @property
    def out(self) -> torch.Tensor:
        return self._forward[0]

    @property
    def lse(self) -> torch.Tensor:
        return self._forward[1]

    @property
    def p_sum(self) -> torch.Tensor:
        return self._forward[2]

    def policy(self, operation: str, name: str) -> Policy:
        """Name the implementation: it runs, or says why it cannot."""
        named = ((OPERATIONS[operation], name),)
        return Policy(workspace_bytes=self.workspace_bytes, named=named)

    def call(self, operation: str, name: str):
        """Return a function without arguments that runs the operation once.

        Raises:
            ImplementationError: the implementation cannot run these inputs.
        """
        dispatched = DISPATCHED[OPERATIONS[operation]]
        (candidate,) = (c for c in dispatched.candidates if c.name == name)
        if reason := candidate.reason(self.op_call):
            raise ImplementationError(reason)
        policy = self.policy(operation, name)
        tensors = {
            "forward": lambda: (),
            "teacher": lambda: (self.lse,),
            "backward": lambda: (self.out, self.lse, self.dout),
        }[operation]()
        return lambda: dispatched.run(self.op_call, policy, self.sparse_inputs(), *tensors)
