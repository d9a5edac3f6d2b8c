"""The FlashMLA forward through the contract: every difference that its adapter bridges.

Backward is the torch implementation, so these are also forward/backward crossings (trap 5).
"""

import pytest
import torch

from megatron_dsa.dispatch import Policy, choose, device_problem, report, reset_report
from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.sparse_attention import flash_mla
from tests.helpers import leaf, relative_error
from tests.unit.test_sparse_attention import check, make_case

FUSED = Policy(fused=True, workspace_bytes=256 * 2**20)


def problem(**changes):
    shape = {"dtype": torch.bfloat16, "heads": 64, "qk_dim": 576, "v_dim": 512, "topk": 256}
    return device_problem("cuda" if torch.cuda.is_available() else "cpu", **shape | changes)


needs_flash_mla = pytest.mark.skipif(
    flash_mla.unsupported(problem()) is not None, reason=str(flash_mla.unsupported(problem()))
)


@needs_flash_mla
@pytest.mark.parametrize("heads", [1, 2, 16, 24, 64, 96, 128])
@pytest.mark.parametrize(("dim", "with_sink"), [(576, False), (512, True)])
def test_heads(heads, dim, with_sink):
    q, kv, indices = make_case(
        70, 400, heads, dim, 128, device="cuda", dtype=torch.bfloat16, causal=True
    )
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    reset_report()
    check(q, kv, indices, v_dim=512, tolerance=6e-3, sink=sink, scale=0.05, policy=FUSED)
    assert report()["sparse_attention_forward"] == {"flash_mla": 1}


@needs_flash_mla
@pytest.mark.parametrize("k", [1, 63, 64, 100, 640, 2048])
def test_widths_and_more_keys_than_exist(k):
    q, kv, indices = make_case(40, 300, 64, 576, k, device="cuda", dtype=torch.bfloat16)
    check(q, kv, indices, v_dim=512, tolerance=6e-3, scale=0.05, policy=FUSED)


@needs_flash_mla
@pytest.mark.parametrize("with_sink", [False, True])
def test_invalid_ids_lengths_and_empty_rows(with_sink):
    """-1 in the middle, ids past the keys, lengths of 0 and beyond K, NaN in unselected rows."""
    q, kv, indices = make_case(24, 300, 64, 576, 128, device="cuda", dtype=torch.bfloat16)
    indices[3] = -1
    indices[:, 7] = -1
    indices[4, 9] = 300
    length = torch.full((24,), 128, dtype=torch.int32, device="cuda")
    length[5], length[6], length[8] = 0, 2, 1000
    used = torch.zeros(300, dtype=torch.bool, device="cuda")
    place = torch.arange(128, device="cuda")
    valid = (indices >= 0) & (indices < 300) & (place < length[:, None])
    used[indices[valid].long()] = True
    sink = leaf(64, seed=5, device="cuda") if with_sink else None
    result = check(
        q, kv, indices, v_dim=512, tolerance=6e-3, sink=sink, topk_length=length, scale=0.05,
        policy=FUSED,
    )  # fmt: skip
    for row in (3, 5):
        assert (result.out[row] == 0).all()
        assert (result.lse[row] == float("-inf")).all()
    with torch.no_grad():
        kv[~used] = float("nan")
    again = sparse_attention(
        q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length, attn_sink=sink,
        policy=FUSED,
    )  # fmt: skip
    assert torch.equal(again.out, result.out)


@needs_flash_mla
def test_teacher_from_a_second_pass():
    """FlashMLA gives no probabilities; they come from its lse and are counted as an operation."""
    q, kv, indices = make_case(40, 300, 64, 576, 128, device="cuda", dtype=torch.bfloat16)
    reset_report()
    arguments = {"softmax_scale": 0.05, "v_dim": 512, "want_p_sum": True}
    fused = sparse_attention(q, kv, indices, policy=FUSED, **arguments)
    assert report()["sparse_attention_probabilities"] == {"torch": 1}
    unfused = sparse_attention(q, kv, indices, policy=Policy(fused=False), **arguments)
    assert relative_error(fused.p_sum, unfused.p_sum) < 1e-3


@needs_flash_mla
def test_no_host_synchronisation():
    """Trap 24."""
    q, kv, indices = make_case(64, 300, 16, 576, 100, device="cuda", dtype=torch.bfloat16)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            sparse_attention(q, kv, indices, softmax_scale=0.05, v_dim=512, policy=FUSED)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_flash_mla
def test_many_rows():
    """Trap 25: more rows than a grid dimension holds, more elements than int32 counts."""
    rows = 70_000
    q = torch.randn(rows, 64, 576, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(512, 576, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(0, 512, (rows, 128), device="cuda", dtype=torch.int32)
    assert q.numel() > 2**31
    arguments = {"softmax_scale": 0.05, "v_dim": 512}
    with torch.no_grad():
        out = sparse_attention(q, kv, indices, policy=FUSED, **arguments).out
        tail = sparse_attention(
            q[-50:], kv, indices[-50:], policy=Policy(fused=False), **arguments
        ).out
    assert relative_error(out[-50:], tail) < 6e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "bf16"),
        ({"qk_dim": 40}, "key dim"),
        ({"heads": 256}, "at most 128 heads"),
    ],
)
def test_reasons_on_hopper(changes, message, monkeypatch):
    """What the kernel does not take is said, whether or not the package is there."""
    monkeypatch.setattr(flash_mla, "package_problem", lambda *_args, **_kwargs: None)
    shape = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "heads": 64}
    from megatron_dsa.dispatch import Problem

    hopper = Problem(**shape | {"qk_dim": 576, "v_dim": 512, "topk": 64} | changes)
    assert message in flash_mla.unsupported(hopper)


def test_named_choice_on_this_machine():
    """Dispatch runs FlashMLA where it can, and otherwise names it among the rejected."""
    choice = choose("sparse_attention_forward", problem(), FUSED)
    if flash_mla.unsupported(problem()) is None:
        assert choice.candidate.name == "flash_mla"
    else:
        assert dict(choice.rejected)["flash_mla"] == flash_mla.unsupported(problem())
