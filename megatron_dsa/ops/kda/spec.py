"""Operations of KDA layers: inputs, implementations, fake kernels, references."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype, ceil_div, items_within
from megatron_dsa.ops.common.checks import FLOATS, INTEGERS, require_tensor
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import FLA
from megatron_dsa.ops.dispatch.support import HALF
from megatron_dsa.ops.meta import differentiable, empty_sums
from megatron_dsa.ops.naive import kda_attention, kda_convolution, kda_norm

_HERE = __package__
#: Lowest log decay of a step: products over 16 steps must not overflow fp32.
LOWEST_GATE = -5.0
#: Largest head dim of fla's kernels.
_WIDEST = 256
#: Tokens per chunk in torch and in fla.
CHUNK, _FLA_CHUNK = 32, 64


def _operation(name: str, title: str, covers: str, probe=None) -> Operation:
    support = Support(
        covers=covers,
        package=FLA,
        **PORTABLE,
        dtypes=HALF,
        deterministic=False,  # each process autotunes the kernel's tiles
        probe=probe,
    )
    return Operation(
        name,
        title,
        (
            Candidate("fla", f"{_HERE}.fla:{name}", support),
            Candidate("torch", f"{_HERE}.torch:{name}", Support(covers="any shape"), fused=False),
        ),
        fake=f"{_HERE}.spec:fake_{name}",
    )


def _too_wide(call) -> str | None:
    wide = call.qk_dim > _WIDEST
    return f"takes heads of at most {_WIDEST} dims, got {call.qk_dim}" if wide else None


CONVOLUTION = _operation(
    "kda_convolution", "short causal convolution with SiLU, forward and backward", "any width"
)
ATTENTION = _operation(
    "kda_attention", "gated delta rule, forward and backward", "gates and norms inside", _too_wide
)
NORM = _operation("kda_norm", "norm of heads with output gate, forward and backward", "any shape")


@dataclass(frozen=True)
class ConvolutionInputs:
    x: torch.Tensor
    weight: torch.Tensor
    cu_seqlens: torch.Tensor | None
    workspace_bytes: int

    def check(self) -> None:
        x = self.x
        require_tensor("x", x, ("batch", "tokens", "channels"), FLOATS)
        shape = (x.shape[2], 1, "kernel")
        fix = "pass the weight of a depthwise convolution"
        require_tensor("weight", self.weight, shape, (accumulation_dtype(x.dtype),), x, fix)
        _require_documents(self.cu_seqlens, x)


@dataclass(frozen=True)
class KDAInputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float
    cu_seqlens: torch.Tensor | None
    workspace_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias

    @property
    def segment(self) -> int:
        """Tokens per segment: torch saves one state per segment for the backward."""
        batch, _, heads, dim = self.q.shape
        # Torch needs six tensors as large as the decays, and saves three for the backward.
        size = 6 * batch * heads * CHUNK * CHUNK * dim * self.A_log.element_size()
        return items_within(self.workspace_bytes, size) * CHUNK

    def check(self) -> None:
        q = self.q
        require_tensor("q", q, ("batch", "tokens", "heads", "dim"), FLOATS)
        fix = "project the same tokens and heads"
        for name in ("k", "v", "g"):
            require_tensor(name, getattr(self, name), tuple(q.shape), (q.dtype,), q, fix)
        require_tensor("beta", self.beta, tuple(q.shape[:3]), (q.dtype,), q, fix)
        wide, heads, dim = (accumulation_dtype(q.dtype),), q.shape[2], q.shape[3]
        require_tensor("A_log", self.A_log, (heads,), wide, q, "pass one per head")
        require_tensor("dt_bias", self.dt_bias, (heads * dim,), wide, q, "pass one per channel")
        require(
            LOWEST_GATE <= self.lower_bound < 0,
            f"lower_bound must be at least {LOWEST_GATE:g} and below 0, got {self.lower_bound}: "
            "products of several steps would overflow; pass that of the model",
        )
        _require_documents(self.cu_seqlens, q)


@dataclass(frozen=True)
class NormInputs:
    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    workspace_bytes: int

    def check(self) -> None:
        x = self.x
        require_tensor("x", x, ("batch", "tokens", "heads", "dim"), FLOATS)
        fix = "project the same tokens and heads"
        require_tensor("gate", self.gate, tuple(x.shape), (x.dtype,), x, fix)
        require_tensor(
            "weight", self.weight, (x.shape[3],), FLOATS, x, "pass one per dim of a head"
        )


def _require_documents(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> None:
    if cu_seqlens is None:
        return
    require_tensor("cu_seqlens", cu_seqlens, ("documents + 1",), INTEGERS, x)
    require(
        x.shape[0] == 1,
        f"the batch must be 1 with cu_seqlens, got {x.shape[0]}: pack all documents, or pass None",
    )


def fake_kda_convolution(candidate: Candidate, inputs: ConvolutionInputs) -> torch.Tensor:
    def forward(x, weight):
        return (torch.empty_like(x),), (x, weight)

    def backward(x, weight):
        return torch.empty_like(x), torch.empty_like(weight)

    # fla allocates partial sums of the weight gradient and recomputes the output.
    workspace_bytes = inputs.workspace_bytes if not candidate.fused else inputs.x.nbytes
    return differentiable((inputs.x, inputs.weight), forward, backward, workspace_bytes)


def fake_kda_attention(candidate: Candidate, inputs: KDAInputs) -> torch.Tensor:
    q = inputs.q
    batch, tokens, heads, dim = q.shape

    def forward(*tensors):
        out, kept = torch.empty_like(inputs.v), list(tensors)
        if candidate.fused:  # fla saves normalised queries and keys, and two matrices per chunk
            kept[:2] = torch.empty_like(q), torch.empty_like(q)
            norms = (empty_sums(q, batch, tokens, heads) for _ in range(2))
            matrices = (q.new_empty(batch, tokens, heads, _FLA_CHUNK) for _ in range(2))
            kept += [*norms, *matrices, torch.empty_like(inputs.beta)]
        else:
            states = ceil_div(tokens, inputs.segment)
            kept.append(empty_sums(q, states, batch, heads, dim, dim))
        return (out,), tuple(kept)

    def backward(*kept):
        return tuple(torch.empty_like(x) for x in inputs.tensors)

    workspace_bytes = inputs.workspace_bytes
    if candidate.fused:
        # fla allocates all chunks' states, five tensors as large as q, and fp32 sums of decays.
        states = batch * ceil_div(tokens, _FLA_CHUNK) * heads * dim * dim * q.element_size()
        workspace_bytes = states + 5 * q.nbytes + 4 * q.numel()
    return differentiable(inputs.tensors, forward, backward, workspace_bytes)


def fake_kda_norm(candidate: Candidate, inputs: NormInputs) -> torch.Tensor:
    x, gate, weight = inputs.x, inputs.gate, inputs.weight

    def forward(x, gate, weight):
        norms = (empty_sums(x, *x.shape[:3]),) if candidate.fused else ()
        return (torch.empty_like(x),), (x, gate, weight, *norms)

    def backward(x, gate, weight, *_norms):
        return torch.empty_like(x), torch.empty_like(gate), torch.empty_like(weight)

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    return differentiable((x, gate, weight), forward, backward, workspace_bytes)


def _documents(cu_seqlens: torch.Tensor | None, x: torch.Tensor) -> list[tuple[int, slice]]:
    """Return the batch element and the tokens of each sequence that is not empty."""
    if cu_seqlens is None:
        return [(element, slice(0, x.shape[1])) for element in range(x.shape[0])]
    bounds = cu_seqlens.tolist()
    return [(0, slice(*pair)) for pair in pairwise(bounds) if pair[0] < pair[1]]


def reference_convolution(inputs: ConvolutionInputs) -> torch.Tensor:
    out = torch.zeros_like(inputs.x)
    for element, tokens in _documents(inputs.cu_seqlens, inputs.x):
        out[element, tokens] = kda_convolution(inputs.x[element, tokens], inputs.weight)
    return out


def reference_attention(inputs: KDAInputs) -> torch.Tensor:
    *by_token, A_log, dt_bias = inputs.tensors
    out = torch.zeros_like(inputs.v)
    for element, tokens in _documents(inputs.cu_seqlens, inputs.q):
        q, k, v, g, beta = (x[element, tokens] for x in by_token)
        out[element, tokens] = kda_attention(q, k, v, g, beta, A_log, dt_bias, inputs.lower_bound)
    return out


def reference_norm(inputs: NormInputs) -> torch.Tensor:
    return kda_norm(inputs.x, inputs.gate, inputs.weight, inputs.eps)
