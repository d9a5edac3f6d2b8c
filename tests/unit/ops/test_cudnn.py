"""cuDNN's backward and indexer operations through the contract, against float64 on a GPU.

Every difference bridged by the adapters is tested: numbers of heads, invalid ids, empty lists,
widths.
"""

import dataclasses

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    indexer_topk,
    sparse_attention,
    sparse_indexer_loss,
)
from megatron_dsa.layers.warm_up import warm_up
from megatron_dsa.ops.common.arithmetic import lengths
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.indexer_loss.spec import kl_sum
from megatron_dsa.ops.indexer_topk.spec import index_scores
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.padding import bucket, masked_indices, padded_heads, with_heads
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
)
from tests.cases.sparse_attention import CASE, make_case, ragged_case
from tests.helpers import double_leaf, leaf, never_waits, relative_error

TOLERANCE = 5e-3
WIDE = Policy(workspace_bytes=256 * 2**20)


def named(*operations, **rest):
    return Policy(named=tuple((operation, "cudnn") for operation in operations), **rest)


CUDNN_BACKWARD = Policy(
    workspace_bytes=256 * 2**20,
    named=(
        ("sparse_attention_forward", "torch"),
        ("sparse_attention_backward", "cudnn"),
        ("sparse_attention_probabilities", "cudnn"),
    ),
)
SELECT = named("indexer_scores", "indexer_topk")
LOSS = named("sparse_indexer_loss")


def attention_call(heads, dim):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return describe_call(device, dtype=torch.bfloat16, heads=heads, qk_dim=dim, v_dim=512, topk=128)


def reason() -> str | None:
    return BACKWARD.candidates[0].reason(attention_call(64, 576))


def needs_cudnn(test):
    return pytest.mark.gpu(pytest.mark.skipif(reason() is not None, reason=str(reason()))(test))


def test_buckets():
    assert [bucket(k) for k in (1, 128, 129, 256, 257, 640, 1152, 2048, 2049)] == [
        128, 128, 256, 256, 512, 1024, 1536, 2048, 2560,
    ]  # fmt: skip
    assert [padded_heads(h, (8, 16, 32, 64)) for h in (1, 9, 33, 64, 65, 128)] == [
        8, 16, 64, 64, 128, 128,
    ]  # fmt: skip
    lists = torch.zeros(3, 130, dtype=torch.int32)
    topk_length = torch.tensor([-1, 7, 999], dtype=torch.int32)
    assert lengths(lists, None).tolist() == [130] * 3
    assert lengths(lists, topk_length).tolist() == [0, 7, 130]
    lists[1, 3], lists[2, 5] = 9, -4  # outside of 9 keys
    valid, indices = masked_indices(lists, topk_length, 9)
    assert valid.sum(-1).tolist() == [0, 6, 129]
    assert indices.shape == (3, 256) and (indices[:, 130:] == -1).all()
    assert torch.equal(indices[:, :130], torch.where(valid, 0, -1).int())


def test_heads_are_padded_where_they_stand():
    x = torch.ones(2, 3, 4)
    assert with_heads(x, 3, -2) is x
    assert torch.equal(with_heads(x, 5, -2), torch.cat([x, torch.zeros(2, 2, 4)], 1))
    assert with_heads(x[..., 0], 4, -1, 7.0)[0].tolist() == [1, 1, 1, 7]


def index_inputs(rows, heads=64, seed=1, integers=False, device="cuda"):
    def make(*shape, seed):
        x = leaf(*shape, seed=seed).detach()
        return (x.mul(1.5).round() if integers else x).to(device, torch.bfloat16)

    return IndexerInputs(
        make(rows, heads, 128, seed=seed),
        make(rows, 128, seed=seed + 1),
        make(rows, heads, seed=seed + 2) * 2**-5,
    )


LAYOUTS = {
    "one sequence": lambda: bshd_layout(600, 1, torch.device("cuda")),
    "batch of 3": lambda: bshd_layout(200, 3, torch.device("cuda")),
    "packed": lambda: packed_layout(
        torch.tensor([0, 2, 2, 310, 555], device="cuda", dtype=torch.int32), 600, 308
    ),
}


@needs_cudnn
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("workspace", [2**17, 2**26])
def test_selection(name, heads, workspace):
    layout, inputs = LAYOUTS[name](), index_inputs(600, heads, integers=True)
    operations = ("indexer_scores",) if name == "packed" else ("indexer_scores", "indexer_topk")
    policy = named(*operations, workspace_bytes=workspace)
    reset_report()
    got = indexer_topk(inputs, layout, 64, policy=policy)
    assert set(report()["indexer_scores"]) == {"cudnn"}
    want = indexer_topk(inputs, layout, 64, policy=Policy(fused=False))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@needs_cudnn
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0])
def test_selection_of_equal_scores(value):
    rows = 3000
    inputs = IndexerInputs(
        torch.full((rows, 64, 128), abs(value), device="cuda", dtype=torch.bfloat16),
        torch.ones(rows, 128, device="cuda", dtype=torch.bfloat16),
        torch.full((rows, 64), value, device="cuda", dtype=torch.bfloat16),
    )
    layout = bshd_layout(rows, 1, torch.device("cuda"))
    want = indexer_topk(inputs, layout, 512, policy=Policy(fused=False))[0]
    for _ in range(20):
        assert torch.equal(indexer_topk(inputs, layout, 512, policy=SELECT)[0], want)


@needs_cudnn
def test_selection_with_two_distinct_values():
    """Ties, and relus that are all closed: -0 and +0 are one score."""
    inputs = index_inputs(2500, integers=True)
    inputs.weights.copy_(torch.where(inputs.weights > 0, 1.0, -1.0))
    inputs.q[:, 1:] = 0
    inputs.k.copy_(torch.where(torch.arange(2500, device="cuda")[:, None] % 3 == 0, 1.0, -1.0))
    inputs.q.clamp_(0, 1)
    layout = bshd_layout(2500, 1, torch.device("cuda"))
    got = indexer_topk(inputs, layout, 300, policy=SELECT)[0]
    assert torch.equal(got, indexer_topk(inputs, layout, 300, policy=Policy(fused=False))[0])


@needs_cudnn
@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("k", [64, 100, 640])
@pytest.mark.parametrize("name", LAYOUTS)
def test_sparse_loss(name, heads, k):
    layout, inputs = LAYOUTS[name](), index_inputs(600, heads)
    for x in (inputs.q, inputs.k, inputs.weights):
        x.requires_grad_()
    indices, length = indexer_topk(inputs, layout, k, policy=Policy(fused=False))
    teacher = torch.rand(600, k, generator=torch.Generator().manual_seed(4)).to("cuda") ** 8
    before = teacher.clone()
    reset_report()
    loss = sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length, policy=LOSS)
    assert report() == {"sparse_indexer_loss": {"cudnn": 1}}
    assert torch.equal(teacher, before)  # the caller's tensor is not overwritten
    (loss * 1.7).backward()
    copies = IndexerInputs(*map(double_leaf, (inputs.q, inputs.k, inputs.weights)))
    valid = indices >= 0
    scores = index_scores(copies.q, copies.k, copies.weights).gather(1, indices.clamp_min(0).long())
    want = kl_sum(scores, teacher.double(), valid)
    (want * 1.7).backward()
    assert relative_error(loss, want) < 1e-3
    for field in ("q", "k", "weights"):
        got, expected = getattr(inputs, field).grad, getattr(copies, field).grad
        assert torch.isfinite(got).all(), field
        assert relative_error(got, expected) < 2 * TOLERANCE, field


@needs_cudnn
def test_sparse_loss_pulls_at_underflowed_students():
    """If the student is 0 in fp32 and the teacher is not, the gradient is the teacher."""
    inputs = index_inputs(256)
    inputs.weights.mul_(64)  # scores hundreds apart
    for x in (inputs.q, inputs.k, inputs.weights):
        x.requires_grad_()
    layout = bshd_layout(256, 1, torch.device("cuda"))
    indices, length = indexer_topk(inputs, layout, 128, policy=Policy(fused=False))
    teacher = torch.ones(256, 128, device="cuda")
    grads = {}
    for name, policy in (("cudnn", LOSS), ("torch", Policy(fused=False))):
        loss = sparse_indexer_loss(
            inputs, indices, teacher, layout, topk_length=length, policy=policy
        )
        grads[name] = torch.autograd.grad(loss, (inputs.q, inputs.k, inputs.weights))
    for got, want in zip(grads["cudnn"], grads["torch"], strict=True):
        assert relative_error(got, want) < 2 * TOLERANCE


@needs_cudnn
def test_no_host_synchronisation():
    q, kv, indices, length, _ = ragged_case(16)
    inputs = index_inputs(600, 64)
    for x in (inputs.q, inputs.k, inputs.weights):
        x.requires_grad_()
    layout = LAYOUTS["one sequence"]()

    def call():
        result = sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length,
            want_p_sum=True, policy=CUDNN_BACKWARD,
        )  # fmt: skip
        result.out.sum().backward()
        selection, count = indexer_topk(inputs, layout, 64, policy=SELECT)
        sparse_indexer_loss(
            inputs, selection, torch.ones(600, 64, device="cuda"), layout, topk_length=count,
            policy=LOSS,
        ).backward()  # fmt: skip

    never_waits(call)


@needs_cudnn
def test_nothing_compiles_after_the_warm_up(monkeypatch):
    attention = dataclasses.replace(attention_call(64, 576), topk=640)
    index = describe_call("cuda", dtype=torch.bfloat16, heads=32, qk_dim=128, v_dim=0, topk=640)
    names = ("forward", "backward", "probabilities")
    calls = [(f"sparse_attention_{name}", attention) for name in names]
    calls.append(("sparse_indexer_loss", index))
    policy = Policy(
        named=(
            *CUDNN_BACKWARD.named,
            *LOSS.named,
            ("indexer_scores", "torch"),
            ("indexer_topk", "torch"),
        )
    )
    reset_report()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    warm_up(tuple(calls), policy, 0.05)
    assert report() == {}
    assert torch.equal(before[0], torch.cuda.get_rng_state())
    assert torch.equal(before[1], torch.get_rng_state())

    import cutlass.cute as cute

    def no_compiler(*_args, **_kwargs):
        raise AssertionError("a kernel was compiled after the warm-up")

    monkeypatch.setattr(cute, "compile", no_compiler)
    for rows, k, with_length in ((100, 640, False), (333, 1000, True)):
        q, kv, indices = make_case(rows, 1200, 64, 576, k, **CASE)
        inputs = index_inputs(1200, 32)
        inputs.q.requires_grad_()
        length = torch.full((rows,), k, dtype=torch.int32, device="cuda") if with_length else None
        result = sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length, want_p_sum=True,
            policy=policy,
        )  # fmt: skip
        result.out.sum().backward()
        queries = IndexerInputs(inputs.q[:rows], inputs.k, inputs.weights[:rows])
        layout = bshd_layout(rows, 1, torch.device("cuda"))
        sparse_indexer_loss(queries, indices, result.p_sum, layout, policy=policy).backward()
    with pytest.raises(AssertionError, match="compiled after"):  # the trap itself works
        q, kv, indices = make_case(64, 300, 24, 576, 3000, **CASE)
        sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=512, policy=policy
        ).out.sum().backward()
