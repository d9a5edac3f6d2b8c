"""Dense attention of the dense and warm-up stages against float64."""

import pytest
import torch

from megatron_dsa.dsa_kernels import dense_attention
from megatron_dsa.ops.dense_attention.spec import reference
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.testing.cases import visible_keys
from tests.cases.indexer_loss import LAYOUTS
from tests.helpers import double_leaf, leaf, relative_error

SMALL = Policy(fused=False, workspace_bytes=60_000)


def run_case(layout, device, dtype, policy, *, dim=24, v_dim=16, rows=48):
    q, k, v = (
        leaf(rows, 4, d, seed=seed, device=device, dtype=dtype)
        for seed, d in ((1, dim), (2, dim), (3, v_dim))
    )
    copies = [double_leaf(x) for x in (q, k, v)]
    out, lse = dense_attention(q, k, v, layout, softmax_scale=0.3, policy=policy)
    expected = reference(*copies, visible_keys(layout), 0.3)
    grad = leaf(rows, 4, v_dim, seed=4, device=device, dtype=dtype).detach()
    out.backward(grad)
    expected.backward(grad.double())
    seen = visible_keys(layout)
    logits = torch.einsum("qhd,khd->qhk", copies[0], copies[1]) * 0.3
    right = logits.masked_fill(~seen[:, None], float("-inf")).logsumexp(-1).detach()
    finite = right.isfinite()
    assert finite.equal(lse.isfinite()) and not lse.requires_grad
    assert relative_error(lse[finite], right[finite]) < (1e-12 if dtype == torch.float64 else 1e-3)
    pairs = [(out, expected)] + [(x.grad, y.grad) for x, y in zip((q, k, v), copies, strict=True)]
    return max(relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_matches_float64(device, name):
    assert run_case(LAYOUTS[name](device), device, torch.float64, SMALL) < 1e-12


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 5e-3)])
def test_lower_precision(device, dtype, tolerance):
    assert run_case(bshd_layout(48, 1, device), device, dtype, SMALL) < tolerance


def test_empty_sequences_alone(device):
    cu = torch.zeros(3, dtype=torch.int32, device=device)
    q, k, v = (leaf(8, 2, 16, seed=n, device=device, dtype=torch.float64) for n in (1, 2, 3))
    out, lse = dense_attention(q, k, v, packed_layout(cu, 8, 0), softmax_scale=0.3, policy=SMALL)
    out.sum().backward()
    assert not out.any() and lse.isneginf().all()
    assert not any(x.grad.any() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
def test_a_fused_kernel_is_used_and_right(batch):
    """Key dim 192, value dim 128: cuDNN supports them on Hopper and Blackwell, others pad
    values.
    """
    reset_report()
    layout = bshd_layout(256 // batch, batch, torch.device("cuda"))
    error = run_case(
        layout, "cuda", torch.bfloat16, Policy(fused=True), dim=192, v_dim=128, rows=256
    )
    assert error < 8e-3
    (name,) = report()["dense_attention"]
    assert name == "torch-cudnn" if torch.cuda.get_device_capability()[0] >= 9 else name != "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_packed_batches_have_a_fused_kernel(padded):
    reset_report()
    cu, more = torch.tensor([0, 20, 48], device="cuda", dtype=torch.int32), {}
    if padded:
        more = {"cu_seqlens_padded": torch.tensor([0, 20, 48], device="cuda", dtype=torch.int32)}
        cu = torch.tensor([0, 13, 40], device="cuda", dtype=torch.int32)
    policy = Policy(fused=True, workspace_bytes=60000)
    assert run_case(packed_layout(cu, 48, 28, **more), "cuda", torch.bfloat16, policy) < 8e-3
    (name,) = report()["dense_attention"]
    assert name in ("flash2", "torch-flash")
