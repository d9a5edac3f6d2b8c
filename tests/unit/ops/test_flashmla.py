"""FlashMLA: differences bridged by its adapter, its probe, its messages.

Values against float64: ``test_sparse_attention.py``.
"""

import dataclasses
import math
import re
import sys
import types

import pytest
import torch

from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.packages import Package
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import FORWARD, SparseAttentionInputs
from tests.cases.sparse_attention import make_case
from tests.helpers import leaf

FLASHMLA = {c.name: c for c in FORWARD.candidates}["flashmla"]


def op_call(**changes):
    shape = {"dtype": torch.bfloat16, "heads": 64, "qk_dim": 576, "v_dim": 512, "topk": 256}
    return describe_call("cuda" if torch.cuda.is_available() else "cpu", **shape | changes)


def strict_upstream(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    """FlashMLA in torch: its accepted inputs, and its results without keys."""
    width = indices.shape[2]
    assert q.shape[1] in (64, 128) and kv.shape[1] == 1 and width % 128 == 0
    assert all(x.is_contiguous() for x in (q, kv, indices))
    assert attn_sink is None or attn_sink.shape == q.shape[1:2]
    assert topk_length is None or (topk_length.min() >= 0 and topk_length.max() <= width)
    out, lse, _ = unfused.forward(
        SparseAttentionInputs(
            q, kv[:, 0], indices[:, 0], d_v, sm_scale, topk_length, attn_sink, 2**20
        )
    )
    return out, lse, torch.where(lse == float("-inf"), float("inf"), lse)


@pytest.mark.parametrize(("heads", "width", "with_sink"), [(16, 100, True), (96, 128, False)])
def test_what_the_adapter_bridges(heads, width, with_sink, monkeypatch):
    module = types.ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = strict_upstream
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    q, kv, indices = make_case(6, 150, heads, 576, width, device="cpu", dtype=torch.bfloat16)
    indices[1] = -1
    length = torch.tensor([width, width, 0, -3, width + 40, 2], dtype=torch.int32)
    sink = leaf(heads, seed=3).detach() if with_sink else None
    case = SparseAttentionInputs(q.detach(), kv.detach(), indices, 512, 0.05, length, sink, 2**20)
    got, want = flashmla.forward(case), unfused.forward(case)
    assert torch.equal(got[1] == float("-inf"), want[1] == float("-inf"))
    assert (got[1][1:4] == float("-inf")).all() and torch.isfinite(got[1][4:]).all()
    for x, y in zip(got[:2], want[:2], strict=True):
        assert x.shape == y.shape and torch.allclose(x, y, rtol=1e-2, atol=1e-2)


def test_padded_queries_are_not_copied(monkeypatch):
    """The kernel must read the caller's tensor, and its result be a view."""
    seen = {}

    def upstream(q, kv, indices, *settings, **more):
        seen["q"], (out, top, lse) = q, strict_upstream(q, kv, indices, *settings, **more)
        seen["out"] = out
        return out, top, lse

    module = types.ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = upstream
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    q, kv, indices = make_case(6, 150, 48, 576, 128, device="cpu", dtype=torch.bfloat16)
    padded_q = torch.zeros(6, 64, 576, dtype=torch.bfloat16)
    padded_q[:, :48] = q.detach()
    case = SparseAttentionInputs(
        padded_q[:, :48], kv.detach(), indices, 512, 0.05, None, None, 2**20, padded_q=padded_q
    )
    out, lse, _ = flashmla.forward(case)
    assert seen["q"] is padded_q and out.data_ptr() == seen["out"].data_ptr()
    assert out.shape == (6, 48, 512) and lse.shape == (6, 48)
    copied = flashmla.forward(dataclasses.replace(case, padded_q=None))
    assert seen["q"] is not padded_q and torch.equal(seen["q"], padded_q)
    wrong = torch.zeros(6, 128, 576, dtype=torch.bfloat16)
    other = flashmla.forward(dataclasses.replace(case, padded_q=wrong))
    for given in (copied, other):  # this number of heads needs other padding
        assert torch.equal(given[0], out) and torch.equal(given[1], lse)


@pytest.mark.parametrize("heads", [1, 48, 64, 65, 128])
def test_declared_head_sizes_are_those_of_the_adapter(heads):
    q = torch.zeros(1, heads, 576, dtype=torch.bfloat16)
    case = SparseAttentionInputs(
        q, q[0], torch.zeros(1, 128, dtype=torch.int32), 512, 1.0, None, None, 2**20
    )
    assert FLASHMLA.support.kernel_heads(heads) == flashmla.padded(case)[0].shape[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "needs bf16, got torch.float32"),
        ({"qk_dim": 40}, "needs dims 576/512 or 512/512 (query and key/value), got 40/512"),
        ({"heads": 256}, "takes 1 to 128 heads, got 256"),
    ],
)
def test_reasons_on_hopper(changes, message, monkeypatch):
    monkeypatch.setattr(Package, "problem", lambda *_args: None)
    shape = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "heads": 64}
    hopper = OpCall(**shape | {"qk_dim": 576, "v_dim": 512, "topk": 64} | changes)
    assert FLASHMLA.reason(hopper) == message


def test_choice_on_this_machine():
    reason = FLASHMLA.reason(op_call())
    policy = Policy(named=(("sparse_attention_forward", "flashmla"),))
    if reason is None:
        choice = FORWARD.choose(op_call(), policy)
        assert choice.candidate.name == "flashmla"
    else:
        with pytest.raises(ImplementationError, match=re.escape(reason)):
            FORWARD.choose(op_call(), policy)


def upstream(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None): ...


def test_upstream_signature_is_accepted_and_others_are_named(monkeypatch):
    def old(q, kv, indices, sm_scale, d_v=512): ...

    def fork(q, kv, indices, sm_scale, workspace, d_v, attn_sink, topk_length): ...

    monkeypatch.setattr(flashmla, "_lse_complaint", lambda _function: None)
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
        reason = flashmla.probe(op_call())
        assert (reason is None) == (parts is None), reason
        for part in parts or ():
            assert part in reason


@pytest.mark.gpu
@pytest.mark.parametrize(("base", "message"), [(2.0, "natural log is 4.852"), (math.e, None)])
def test_a_base_2_lse_is_noticed(base, message):
    """A base-2 build would silently give wrong gradients."""

    def forward(q, kv, indices, sm_scale):
        lse = torch.full((1, 64), math.log(128) / math.log(base), device="cuda")
        return q[..., :512], lse, lse

    reason = flashmla._lse_complaint(forward)
    assert reason is None if message is None else message in reason
