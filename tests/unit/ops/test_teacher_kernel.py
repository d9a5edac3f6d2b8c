"""Conformance of the head sums of sparse attention; also Triton's interpreted and compiled."""

import pytest
import torch

from megatron_dsa.ops.sparse_attention.spec import (
    PROBABILITIES,
    SparseAttentionInputs,
    reference,
)
from tests.cases.triton_kernels import (
    assembly,
    interpret,
    let_interpreter_use_bf16,
    prepare_interpreter,
    recorded,
)
from tests.helpers import no_synchronisation, relative_error, skip_unless_it_runs

MODULE = "megatron_dsa.ops.sparse_attention.triton"
IMPLEMENTATIONS = {candidate.name: candidate for candidate in PROBABILITIES.candidates}
#: Heads, dim, entries, sink, dtype. One block of heads and several, dims and lists that no block
#: divides, one head, V3.2's and V4's dims.
CASES = [
    (1, 24, 5, False, torch.float32),
    (3, 40, 70, True, torch.float32),
    (16, 72, 64, False, torch.bfloat16),
    (40, 576, 130, False, torch.bfloat16),
    (130, 64, 67, True, torch.float32),
    (128, 512, 128, True, torch.bfloat16),
]
#: Relative error in the norm; products of bf16 are exact, sums are fp32, except cuDNN's.
TOLERANCES = {"torch": 2e-6, "triton": 2e-6, "cudnn": 5e-3}
#: cuDNN's numbers of heads, with and without padding.
CUDNN_CASES = [
    (heads, dim, 128, dim == 512, torch.bfloat16)
    for heads in (1, 16, 24, 64, 96, 128)
    for dim in (576, 512)
]


def make(heads, dim, entries, sink, dtype, device="cpu", rows=9, keys=90):
    """Draw ragged lists with invalid ids, also past the length; unselected keys are NaN. Tensors
    are slices.
    """
    generator = torch.Generator().manual_seed(heads + dim)

    def normal(*shape):
        wide = torch.randn(*shape[:-1], shape[-1] + 16, generator=generator)
        return wide.to(dtype).to(device)[..., : shape[-1]]

    q, kv = normal(rows, heads, dim), normal(keys, dim)
    indices = torch.randint(0, keys - 1, (rows, entries), generator=generator, dtype=torch.int32)
    indices[:, ::7], indices[:, 3] = -1, keys  # no key
    indices[2] = -1
    length = torch.randint(1, entries + 1, (rows,), generator=generator, dtype=torch.int32)
    length[3], length[4] = 0, entries + 5
    kv[keys - 1] = float("nan")
    sinks = torch.randn(heads, generator=generator).to(device) if sink else None
    return SparseAttentionInputs(
        q, kv, indices.to(device), min(dim, 512), dim**-0.5, length.to(device), sinks, 2**20
    )


def expected(inputs):
    """Return ``lse`` and the head sum of the probabilities, in float64 on the CPU."""
    q, kv = inputs.q.cpu().double(), inputs.kv.cpu().double().nan_to_num()
    indices, length = inputs.indices.cpu(), inputs.topk_length.cpu()
    sink = None if inputs.sink is None else inputs.sink.cpu().double()
    scale = inputs.softmax_scale
    _, lse, _ = reference(
        q, kv, indices, v_dim=inputs.v_dim, softmax_scale=scale, topk_length=length, sink=sink
    )
    total = lse if sink is None else torch.logaddexp(lse, sink.expand_as(lse))
    valid = (indices >= 0) & (indices < len(kv))
    valid &= torch.arange(indices.shape[1]) < length[:, None]
    keys = kv[torch.where(valid, indices, 0).long()]
    probs = torch.exp(torch.einsum("qhd,qkd->qhk", q, keys) * scale - total[..., None])
    return lse, torch.where(valid, probs.sum(1), 0.0), valid


def check(case, device, name="triton"):
    """Check that unselected keys, even NaN, have no effect and every entry is written."""
    inputs = make(*case, device=device)
    lse, want, valid = expected(inputs)
    got = IMPLEMENTATIONS[name].load()(inputs, lse.float().to(device)).cpu()
    assert got.dtype == torch.float32 and not got.isnan().any()
    assert (got[~valid] == 0).all()
    assert relative_error(got, want) < TOLERANCES[name]


@pytest.mark.parametrize("case", CASES)
def test_torch(case, device):
    check(case, device, "torch")


def test_interpreted():
    interpret(__file__)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("case", [(16, 576, 2048), (128, 576, 2048), (64, 512, 640)])
def test_compiles(monkeypatch, case, capability):
    module = pytest.importorskip(MODULE)
    (recorder,) = recorded(monkeypatch, module, ["head_sums"])
    heads, dim, entries = case
    inputs = make(heads, dim, entries, True, torch.bfloat16)
    module.probabilities(inputs, torch.zeros(len(inputs.q), heads))
    ((args, kwargs),) = recorder.launches
    compiled = assembly(recorder.kernel, args, kwargs, capability)
    assert compiled.metadata.shared <= 99 * 1024
    ptx = compiled.asm["ptx"]
    assert "mma" in ptx and "cp.async.cg.shared.global" in ptx


def test_empty():
    module = pytest.importorskip(MODULE)
    inputs = make(3, 24, 5, False, torch.float32, rows=5)
    none = SparseAttentionInputs(inputs.q, inputs.kv, inputs.indices[:, :0], 24, 1.0, None, None, 1)
    assert module.probabilities(none, torch.zeros(5, 3)).shape == (5, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "case"),
    [("triton", case) for case in CASES] + [("cudnn", case) for case in CUDNN_CASES],
)
def test_on_a_gpu(name, case):
    skip_unless_it_runs(IMPLEMENTATIONS[name], *case[:2] if name == "cudnn" else ())
    check(case, "cuda", name)


@pytest.mark.gpu
def test_repeatable_without_a_synchronisation():
    module = pytest.importorskip(MODULE)
    inputs = make(128, 576, 2048, False, torch.bfloat16, "cuda", rows=300, keys=4000)
    lse = expected(inputs)[0].float().cuda()
    first = module.probabilities(inputs, lse)
    with no_synchronisation():
        same = [(module.probabilities(inputs, lse) == first).all() for _ in range(20)]
    assert torch.stack(same).all()


if __name__ == "__main__":
    prepare_interpreter()
    let_interpreter_use_bf16()
    for case in CASES:
        check(case, "cpu")
