"""The FlashMLA forward through the contract: every difference that its adapter bridges.

Backward is the torch implementation, so these are also forward/backward crossings (trap 5).
"""

import math
import sys
import types

import pytest
import torch

from megatron_dsa.dispatch import (
    Policy,
    candidates,
    choose,
    device_problem,
    report,
    reset_report,
)
from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.packages import Package
from megatron_dsa.support import Problem
from tests.helpers import leaf, relative_error
from tests.unit.test_sparse_attention import check, make_case

FUSED = Policy(
    workspace_bytes=256 * 2**20,
    named=(("sparse_attention_backward", "torch"), ("sparse_attention_probabilities", "torch")),
)
FLASHMLA = candidates("sparse_attention_forward")[0]


def problem(**changes):
    shape = {"dtype": torch.bfloat16, "heads": 64, "qk_dim": 576, "v_dim": 512, "topk": 256}
    return device_problem("cuda" if torch.cuda.is_available() else "cpu", **shape | changes)


needs_flashmla = pytest.mark.skipif(
    FLASHMLA.reason(problem()) is not None, reason=str(FLASHMLA.reason(problem()))
)


@needs_flashmla
@pytest.mark.parametrize("heads", [1, 2, 16, 24, 64, 96, 128])
@pytest.mark.parametrize(("dim", "with_sink"), [(576, False), (512, True)])
def test_heads(heads, dim, with_sink):
    q, kv, indices = make_case(
        70, 400, heads, dim, 128, device="cuda", dtype=torch.bfloat16, causal=True
    )
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    reset_report()
    check(q, kv, indices, v_dim=512, tolerance=6e-3, sink=sink, scale=0.05, policy=FUSED)
    assert report()["sparse_attention_forward"] == {"flashmla": 1}


@needs_flashmla
@pytest.mark.parametrize("k", [1, 63, 64, 100, 640, 2048])
def test_widths_and_more_keys_than_exist(k):
    q, kv, indices = make_case(40, 300, 64, 576, k, device="cuda", dtype=torch.bfloat16)
    check(q, kv, indices, v_dim=512, tolerance=6e-3, scale=0.05, policy=FUSED)


@needs_flashmla
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


@needs_flashmla
def test_teacher_from_a_second_pass():
    """FlashMLA gives no probabilities; they come from its lse and are counted as an operation."""
    q, kv, indices = make_case(40, 300, 64, 576, 128, device="cuda", dtype=torch.bfloat16)
    reset_report()
    arguments = {"softmax_scale": 0.05, "v_dim": 512, "want_p_sum": True}
    fused = sparse_attention(q, kv, indices, policy=FUSED, **arguments)
    assert report()["sparse_attention_probabilities"] == {"torch": 1}
    unfused = sparse_attention(q, kv, indices, policy=Policy(fused=False), **arguments)
    assert relative_error(fused.p_sum, unfused.p_sum) < 1e-3


@needs_flashmla
def test_no_host_synchronisation():
    """Trap 24."""
    q, kv, indices = make_case(64, 300, 16, 576, 100, device="cuda", dtype=torch.bfloat16)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            sparse_attention(q, kv, indices, softmax_scale=0.05, v_dim=512, policy=FUSED)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@needs_flashmla
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
        ({"dtype": torch.float32}, "needs bf16, got torch.float32"),
        ({"qk_dim": 40}, "needs dims (query/key, value) (576, 512) or (512, 512), got (40, 512)"),
        ({"heads": 256}, "takes 1 to 128 heads, got 256"),
    ],
)
def test_reasons_on_hopper(changes, message, monkeypatch):
    """What the kernel does not take is said where the package is there."""
    monkeypatch.setattr(Package, "problem", lambda *_args: None)
    shape = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "heads": 64}
    hopper = Problem(**shape | {"qk_dim": 576, "v_dim": 512, "topk": 64} | changes)
    assert FLASHMLA.reason(hopper) == message


def test_choice_on_this_machine():
    """Dispatch runs FlashMLA where it can, and otherwise names it among the rejected."""
    choice = choose("sparse_attention_forward", problem(), FUSED)
    if FLASHMLA.reason(problem()) is None:
        assert choice.candidate.name == "flashmla"
    else:
        assert dict(choice.rejected)["flashmla"] == FLASHMLA.reason(problem())


def upstream(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None): ...


def test_upstream_signature_is_accepted_and_others_are_named(monkeypatch):
    def old(q, kv, indices, sm_scale, d_v=512): ...

    def fork(q, kv, indices, sm_scale, workspace, d_v, attn_sink, topk_length): ...

    monkeypatch.setattr(flashmla, "_lse_problem", lambda _function: None)
    for function, parts in (
        (upstream, None),
        (old, ["lacks ['attn_sink', 'topk_length']"]),
        (fork, ["requires ['workspace']", "github.com/deepseek-ai/FlashMLA"]),
        (None, ["no flash_mla_sparse_fwd"]),
    ):
        module = types.ModuleType("flash_mla")
        if function is not None:
            module.flash_mla_sparse_fwd = function
        monkeypatch.setitem(sys.modules, "flash_mla", module)
        reason = flashmla.probe(problem())
        assert (reason is None) == (parts is None), reason
        for part in parts or ():
            assert part in reason


@pytest.mark.gpu
@pytest.mark.parametrize(("base", "message"), [(2.0, "natural log is 4.852"), (math.e, None)])
def test_a_base_2_lse_is_noticed(base, message):
    """Trap 5: a copy that answers in base 2 would give silently wrong gradients."""

    def forward(q, kv, indices, sm_scale):
        lse = torch.full((1, 64), math.log(128) / math.log(base), device="cuda")
        return q[..., :512], lse, lse

    reason = flashmla._lse_problem(forward)
    assert reason is None if message is None else message in reason
