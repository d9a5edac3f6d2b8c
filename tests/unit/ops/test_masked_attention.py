"""Masked dense attention against float64: values, teacher, all gradients, wrong arguments."""

import dataclasses
import weakref

import pytest
import torch

from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    key_bits,
    masked_attention,
    sparse_attention,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch.support import import_attribute
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.masked_attention import torch as unfused
from megatron_dsa.ops.masked_attention.spec import (
    BACKWARD,
    FORWARD,
    KEY_BITS,
    PROBABILITIES,
    VISIBLE_BITS,
    KeyBitsInputs,
    VisibleBitsInputs,
)
from megatron_dsa.testing.cases import Lists
from megatron_dsa.testing.comparison import Comparison
from megatron_dsa.testing.masked_attention import (
    MaskedDims,
    MaskedReference,
    check_parts,
    masked_case,
)
from tests.cases.masked_attention import (
    DIMS,
    SMALL,
    ascending_lists,
    bits_of,
    check,
    mixed_lists,
)
from tests.helpers import leaf, peak_bytes, relative_error

SIZES = (1, 127, 128, 129, 300)


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("queries", [1, 40])
def test_lists_in_order(queries, keys):
    lists = ascending_lists(queries, keys, 17)
    result = check(lists)
    assert torch.equal(result.p_sum != 0, lists.valid)


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("queries", SIZES)
def test_lists_in_any_order(queries, keys):
    check(mixed_lists(queries, keys, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    result = check(mixed_lists(40, 300, 30), dtype)
    assert result.lse.dtype == result.p_sum.dtype == torch.float32


def test_fp16_results_and_gradients():
    case = masked_case(DIMS, ascending_lists(20, 150, 30), torch.float16)
    found = Comparison(2e-3)
    inputs, reference = case.inputs(), MaskedReference(case)
    out, lse = unfused.forward(inputs)
    reference.forward(found, out, lse)
    grads = unfused.backward(inputs, out, lse, case.dout)
    reference.backward(found, *grads)
    assert not found.wrong()
    assert [x.dtype for x in grads] == [torch.float16, torch.float16, torch.float32]


def test_no_queries():
    lists = Lists(torch.zeros(0, 5, dtype=torch.int32), None, 130)
    case = masked_case(DIMS, lists, torch.float64)
    leaves = [x.requires_grad_() for x in (case.q, case.kv, case.k_pe)]
    result = masked_attention(*leaves, bits_of(lists), softmax_scale=0.3, topk=5, want_p_sum=True)
    assert result.out.shape == (0, 3, 6) and result.p_sum.shape == (0, 5)
    grads = torch.autograd.grad(result.out, leaves, case.dout)
    assert all((x == 0).all() and x.shape == y.shape for x, y in zip(grads, leaves, strict=True))


def test_no_keys_of_any_query():
    result = check(Lists(torch.full((10, 4), -1, dtype=torch.int32), None, 20))
    assert (result.p_sum == 0).all()


def test_probabilities_in_ascending_order_of_the_keys():
    case = masked_case(DIMS, mixed_lists(40, 300, 30), torch.float64)
    reference, found = MaskedReference(case), Comparison(1e-12)
    for workspace in (1, 40_000, 10**9):
        inputs = dataclasses.replace(case, workspace_bytes=workspace).inputs()
        for some in (slice(0, 40), slice(7, 9)):
            sums = unfused.probabilities(inputs, reference.expected.lse, 50, some)
            reference.listed_keys(found, sums, some)
    assert not found.wrong()


def test_parts_of_the_queries_with_a_part_of_the_heads_each():
    case = masked_case(MaskedDims(4, 8, 4, 6), mixed_lists(40, 300, 30), torch.float64)
    found = Comparison(1e-12)
    for parts in (1, 2, 4):
        check_parts(found, case, parts, unfused.probabilities, 50)
    assert not found.wrong()


def test_more_keys_than_topk_are_refused():
    case = masked_case(DIMS, ascending_lists(7, 130, 8), torch.float64)
    with pytest.raises(ConfigError, match=r"topk must be at least the number of keys .* got 7"):
        masked_attention(
            case.q, case.kv, case.k_pe, bits_of(case.lists), softmax_scale=0.3, topk=7,
            want_p_sum=True,
        )  # fmt: skip


def test_all_keys_selected_equals_dense_attention():
    case = masked_case(DIMS, ascending_lists(7, 130, 8), torch.float64)
    indices = torch.arange(150, dtype=torch.int32).expand(7, -1)
    result = masked_attention(
        case.q, case.kv, case.k_pe, key_bits(indices, None, 130), softmax_scale=0.3, topk=150,
        want_p_sum=True, policy=SMALL,
    )  # fmt: skip
    k = torch.cat([case.kv[..., :8], case.k_pe[:, None].expand(-1, 3, -1)], -1)
    p = torch.softmax(torch.einsum("qhd,khd->hqk", case.q, k) * 0.3, -1)
    dense = torch.einsum("hqk,khd->qhd", p, case.kv[..., 8:])
    assert relative_error(result.out, dense) < 1e-12
    assert relative_error(result.p_sum[:, :130], p.sum(0)) < 1e-12
    assert (result.p_sum[:, 130:] == 0).all()


def causal_lists(tokens, width):
    """Return up to ``width`` visible keys of every token, in descending order."""
    last = torch.arange(tokens, dtype=torch.int32)[:, None]
    return (last - 2 * torch.arange(width, dtype=torch.int32)).clamp_min(-1)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("descending", [True, False])
def test_equals_sparse_attention_on_latents(descending, with_sink):
    """Outputs, head sum, loss, gradients of queries, latents, weights and of the indexer."""
    tokens, heads, nope, rope, v, rank = 40, 2, 6, 4, 5, 7
    indices = causal_lists(tokens, 6)
    if not descending:
        ordered = torch.where(indices < 0, tokens, indices).sort(1).values
        indices = torch.where(ordered == tokens, -1, ordered)
    results = []
    for masked in (True, False):
        shapes = [(tokens, heads, nope), (tokens, heads, rope), (tokens, rank), (tokens, rope)]
        shapes += [(heads, nope, rank), (heads, v, rank)]
        shapes += [(tokens, 2, 4), (tokens, 4), (tokens, 2)]  # the indexer's
        leaves = [leaf(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
        q_nope, q_pe, latent, k_pe, w_uk, w_uv, *index = leaves
        sink = None
        if with_sink:
            sink = leaf(heads, seed=20, dtype=torch.float64)
            leaves.append(sink)
        recorded = []
        layout = bshd_layout(tokens, 1, torch.device("cpu"))
        settings = {
            "softmax_scale": 0.3, "want_p_sum": True, "policy": SMALL, "attn_sink": sink,
            "indexer": IndexerTraining(
                IndexerInputs(*index), layout, lambda: 0.7, recorded.append
            ),
        }  # fmt: skip
        if masked:
            up = torch.cat([w_uk, w_uv], 1)
            kv = torch.einsum("kr,hdr->khd", latent, up)
            q = torch.cat([q_nope, q_pe], -1)
            bits = key_bits(indices, None, tokens)
            out, lse, p_sum = masked_attention(q, kv, k_pe, bits, topk=6, **settings)
        else:
            q = torch.cat([torch.einsum("qhd,hdr->qhr", q_nope, w_uk), q_pe], -1)
            kv = torch.cat([latent, k_pe], -1)
            out, lse, p_sum = sparse_attention(q, kv, indices, v_dim=rank, **settings)
            # In the order of the keys; 0 without a key.
            p_sum = p_sum.gather(1, torch.where(indices < 0, tokens, indices).argsort(1))
            out = torch.einsum("qhr,hdr->qhd", out, w_uv)
        grads = torch.autograd.grad((out * torch.arange(1, v + 1)).sum(), leaves)
        (loss,) = recorded
        results.append([out, lse, p_sum, loss, *grads])
    for got, expected in zip(*results, strict=True):
        assert expected.norm() > 0
        assert relative_error(got, expected) < 1e-11


def test_a_sink_takes_its_share_of_the_softmax():
    """One of ``-inf`` takes nothing, also of queries without a key; a large one leaves 0."""
    lists = mixed_lists(40, 300, 9)
    case = masked_case(DIMS, lists, torch.float64)
    leaves = [x.requires_grad_() for x in (case.q, case.kv, case.k_pe)]
    sink = torch.tensor([float("-inf"), 0.3, 900.0], dtype=torch.float64, requires_grad=True)
    settings = {"softmax_scale": 0.3, "topk": 9, "policy": SMALL}
    plain = masked_attention(*leaves, bits_of(lists), **settings)
    result = masked_attention(*leaves, bits_of(lists), attn_sink=sink, **settings)
    share = torch.sigmoid(plain.lse - sink).detach().nan_to_num(0.0)
    assert (plain.lse == float("-inf")).any() and torch.equal(result.lse, plain.lse)
    assert relative_error(result.out, plain.out * share[..., None]) < 1e-12
    assert torch.equal(result.out[:, 0], plain.out[:, 0]) and (result.out[:, 2] == 0).all()
    grads = torch.autograd.grad(result.out, [*leaves, sink], case.dout)
    assert all(x.isfinite().all() for x in grads)
    assert grads[-1][0] == 0 and grads[-1][1] != 0
    of_head = torch.autograd.grad(plain.out[:, 0], leaves[0], case.dout[:, 0])[0][:, 0]
    assert relative_error(grads[0][:, 0], of_head) < 1e-12


def test_gradcheck():
    case = masked_case(DIMS, ascending_lists(4, 131, 7), torch.float64)
    bits = bits_of(case.lists)

    def attend(q, kv, k_pe):
        return masked_attention(q, kv, k_pe, bits, softmax_scale=0.3, policy=SMALL).out

    leaves = [x.requires_grad_() for x in (case.q, case.kv, case.k_pe)]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_strided_tensors():
    case = masked_case(DIMS, mixed_lists(20, 140, 9), torch.float64)
    tensors = (case.q, case.kv, case.k_pe)
    strided = [torch.stack([x, x + 1], -1)[..., 0] for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    bits = bits_of(case.lists)
    plain, other = (masked_attention(*x, bits, softmax_scale=0.3) for x in (tensors, strided))
    assert torch.equal(plain.out, other.out)


def test_strided_bits():
    case = masked_case(DIMS, mixed_lists(20, 140, 9), torch.float64)
    q, bits = case.q.requires_grad_(), bits_of(case.lists)
    strided = torch.stack([bits, bits], 1)[:, 0]
    assert not strided.is_contiguous()
    out = masked_attention(q, case.kv, case.k_pe, strided, softmax_scale=0.3).out
    (kept,) = (x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == bits.dtype)
    assert kept.is_contiguous() and torch.equal(kept, bits)


def test_one_part_of_the_teacher_exists_at_a_time(monkeypatch):
    """Lists and head sums of a part must be freed before the next part's."""
    tokens, formed, alive = 500, [], []
    form = unfused.probabilities

    def watched(*arguments):
        alive.append(sum(x() is not None for x in formed))
        found = form(*arguments)
        formed.extend(weakref.ref(x) for x in found)
        return found

    monkeypatch.setattr(unfused, "probabilities", watched)
    case = masked_case(DIMS, Lists(causal_lists(tokens, 6), None, tokens), torch.float32)
    shapes = ((tokens, 2, 4), (tokens, 4), (tokens, 2))
    index = [leaf(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    layout = bshd_layout(tokens, 1, torch.device("cpu"))
    training = IndexerTraining(IndexerInputs(*index), layout, lambda: 1.0)
    out = masked_attention(
        case.q, case.kv, case.k_pe, bits_of(case.lists), softmax_scale=0.3, topk=6,
        indexer=training, policy=SMALL,
    ).out  # fmt: skip
    out.sum().backward()
    assert alive == [0] * 4


def test_temporary_memory_fits_the_workspace():
    case = masked_case(DIMS, ascending_lists(1000, 1000, 40), torch.float32)
    inputs = dataclasses.replace(case, workspace_bytes=2**20).inputs()
    out, lse = unfused.forward(inputs)
    for run in (
        lambda: unfused.forward(inputs),
        lambda: unfused.probabilities(inputs, lse, 40, slice(0, 1000)),
        lambda: unfused.backward(inputs, out, lse, case.dout),
    ):
        returned = sum(x.numel() * x.element_size() for x in run())
        assert peak_bytes(torch.device("cpu"), run) < returned + 2**20


def test_what_is_kept_for_the_backward():
    case = masked_case(DIMS, mixed_lists(20, 140, 9), torch.float32)
    q, bits = case.q.requires_grad_(), bits_of(case.lists)
    out, lse, _ = masked_attention(
        q, case.kv, case.k_pe, bits, softmax_scale=0.3, topk=9, want_p_sum=True
    )
    kept = [x for x in out.grad_fn.saved_tensors if x is not None]
    expected = [q, case.kv, case.k_pe, bits, out, lse]
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in expected]


def properties(result):
    """Return shapes and dtypes of an implementation's results."""
    results = result if isinstance(result, tuple) else (result,)
    return [(x.shape, x.dtype) for x in results]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_plan_returns_the_same(dtype):
    case = masked_case(DIMS, mixed_lists(20, 140, 9), dtype)
    lists, inputs = case.lists, case.inputs()
    out, lse = unfused.forward(inputs)
    given = KeyBitsInputs(lists.indices, lists.length, 140, 10**6)
    seen = VisibleBitsInputs(lists.length, lists.length, None, 140, 10**6)
    for operation, *arguments in (
        (KEY_BITS, given),
        (VISIBLE_BITS, seen),
        (FORWARD, inputs),
        (BACKWARD, inputs, out, lse, case.dout),
        (PROBABILITIES, inputs, lse, 12, slice(5, 9)),
    ):
        planned = [to_meta(x) for x in arguments]
        for candidate in operation.candidates:
            meta = import_attribute(operation.fake)(candidate, *planned)
            real = operation.candidates[-1].load()(*arguments)
            assert properties(meta) == properties(real)


def to_meta(x):
    if isinstance(x, torch.Tensor):
        return x.to("meta")
    if dataclasses.is_dataclass(x):
        fields = {field.name: to_meta(getattr(x, field.name)) for field in dataclasses.fields(x)}
        return dataclasses.replace(x, **fields)
    return x
