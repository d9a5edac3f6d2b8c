"""Non-finite index scores are rejected before the selection."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    dense_indexer_loss,
    indexer_topk,
    sparse_indexer_loss,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.indexer_topk.api import require_finite_scores
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import KeyOwnership, Sharding, sharded_layout
from tests.helpers import check_device_assert, leaf, never_waits
from tests.host import attention_module, hidden_like, packed, small_config, small_csa_config

TOKENS, TOPK = 96, 5
INF, NAN = float("inf"), float("nan")


def padded(device):
    """Return packed sequences with padding inside and after."""
    real = torch.tensor([0, 3, 20, 20, 41, 73], device=device, dtype=torch.int32)
    offsets = torch.tensor([0, 8, 32, 32, 56, 90], device=device, dtype=torch.int32)
    return packed_layout(real, TOKENS, 34, offsets)


def one_of_two(layout, batch, rank):
    sharding = Sharding(cp=2, cp_rank=rank, cp_layout="contiguous")
    places = sharding.global_positions(layout.num_queries // batch, None, layout.start.device)
    return sharded_layout(layout, sharding, KeyOwnership(sharding, places, batch))


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(TOKENS, 1, device),
    "batch of 3": lambda device: bshd_layout(TOKENS // 3, 3, device),
    "packed": padded,
    "first of two ranks": lambda device: one_of_two(padded(device), 1, 0),
    "compressed": lambda device: compressed_keys(bshd_layout(TOKENS, 1, device), 4, True).layout,
    "compressed, packed": lambda device: compressed_keys(padded(device), 4, True).layout,
}


def draw(layout, dtype=torch.float32):
    device, tokens = layout.start.device, layout.num_queries
    shapes = (tokens, 3, 16), (layout.num_keys, 16), (tokens, 3)
    return IndexerInputs(
        *(leaf(*x, seed=i, device=device, dtype=dtype).detach() for i, x in enumerate(shapes))
    )


def seen(layout):
    """Return queries that see a key, and keys that a query sees, by brute force."""
    queries = layout.end > layout.start
    slots = torch.arange(layout.num_keys, device=layout.start.device)
    covers = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    keys = torch.zeros_like(covers[0])
    keys[layout.to_key_indices(slots.int()).long()] = covers.any(0)
    return queries, keys


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_selection_is_refused(layout, name, value):
    """One visible non-finite number must suffice."""
    layout = LAYOUTS[layout](torch.device("cpu"))
    queries, keys = seen(layout)
    for end in (0, -1):
        inputs = draw(layout)
        token = (keys if name == "k" else queries).nonzero()[end, 0]
        getattr(inputs, name)[token, ..., 1] = value
        counts = {x: int(x == name) for x in ("q", "k", "weights")}
        told = (
            f"indexer_topk: .*queries of {counts['q']} and weights of {counts['weights']} of "
            f"{len(queries)} query tokens, keys of {counts['k']} of {len(keys)} key tokens: check"
        )
        with pytest.raises(ConfigError, match=told):
            indexer_topk(inputs, layout, TOPK)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "packed" in name or "rank" in name])
def test_padding_may_hold_anything(layout):
    layout = LAYOUTS[layout](torch.device("cpu"))
    queries, keys = seen(layout)
    inputs = draw(layout)
    want = indexer_topk(inputs, layout, TOPK)
    assert not queries.all() and not keys.all()
    inputs.q[~queries], inputs.weights[~queries], inputs.k[~keys] = NAN, INF, NAN
    got = indexer_topk(inputs, layout, TOPK)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("q", "weights", "fits"),
    [(1e30, 1e-3, True), (1e38, 1e-3, False), (1e20, 1e20, False), (1e-30, 1e36, True)],
)
def test_sums_that_overflow_are_refused(q, weights, fits):
    layout = bshd_layout(TOKENS, 1, torch.device("cpu"))
    inputs = draw(layout)
    inputs.q[:], inputs.weights[7] = q, weights
    inputs.k[:] = 1.0
    scores = (inputs.q.sum(-1) * inputs.weights).sum(-1)
    assert bool(scores.isfinite().all()) == fits
    if fits:
        indexer_topk(inputs, layout, TOPK)
    else:
        with pytest.raises(ConfigError, match=r"can overflow torch.float32 \(largest magnitudes"):
            indexer_topk(inputs, layout, TOPK)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_of_a_type_is_no_error(dtype):
    layout = bshd_layout(TOKENS, 1, torch.device("cpu"))
    inputs = draw(layout, dtype)
    large = {torch.float16: 65504.0, torch.float64: 1e100}
    inputs.q[3, 1, 2] = large.get(dtype, 1e30)
    indexer_topk(inputs, layout, TOPK)


def test_the_dense_loss_is_refused_and_the_sparse_one_is_nan():
    """An unselected key has no part in the sparse loss."""
    layout = bshd_layout(TOKENS, 1, torch.device("cpu"))
    attention = [leaf(TOKENS, n, 8, seed=n, device="cpu").detach() for n in (2, 1)]
    indices, length = indexer_topk(draw(layout), layout, TOPK)
    teacher = torch.ones(indices.shape)
    for name, token in (("q", 50), ("weights", 50), ("k", int(indices[50, 1]))):
        inputs = draw(layout)
        getattr(inputs, name)[token] = NAN
        with pytest.raises(ConfigError, match=r"dense_indexer_loss: .* are NaN or infinite"):
            dense_indexer_loss(inputs, *attention, layout, softmax_scale=0.3)
        call = (indices, teacher, layout)
        assert sparse_indexer_loss(inputs, *call, topk_length=length).isnan()
        gradients = dataclasses.replace(inputs, q=inputs.q.requires_grad_())
        sparse_indexer_loss(gradients, *call, topk_length=length).backward()
        assert inputs.q.grad[50].isnan().any()


class Calls(TorchDispatchMode):
    """Operations that create a tensor, with its number of elements."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.calls.append((func._schema.name, result.numel()))
        return result


@pytest.mark.parametrize(("layout", "limit"), [("one sequence", 6), ("packed", 12)])
def test_a_check_is_a_few_small_kernels(layout, limit):
    """No result may be larger than a number per token."""
    layout = LAYOUTS[layout](torch.device("cpu"))
    inputs = draw(layout)
    require_finite_scores(inputs, layout, "here")  # shared by a microbatch's layers
    with Calls() as mode:
        checked = require_finite_scores(inputs, layout, "here")
    assert 4 < len(mode.calls) <= limit, mode.calls
    assert all(size <= max(layout.num_queries, layout.num_keys) for _, size in mode.calls)
    with Calls() as mode:
        assert require_finite_scores(checked, layout, "here") is checked
    assert mode.calls == []


MODULES = {
    "DSA, sparse": lambda **options: small_config(options=DSAOptions(**options)),
    "DSA, dense loss": lambda **options: small_config(
        options=DSAOptions(**options), dsa_indexer_use_sparse_loss=False
    ),
    "DSA, warmup": lambda **options: small_config(
        options=DSAOptions(stage="warmup", **options), dsa_indexer_use_sparse_loss=False
    ),
    "CSA, sparse": lambda **options: small_csa_config(4, options=DSAOptions(**options)),
    "CSA, warmup": lambda **options: small_csa_config(
        4, options=DSAOptions(stage="warmup", **options), dsa_indexer_use_sparse_loss=False
    ),
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_layer_is_named(name, training, is_packed):
    """NaN in one head's weight would leave its queries without keys."""
    module = attention_module(MODULES[name](evaluate_indexer=True), layer_number=2).train(training)
    x = hidden_like(module, TOKENS)
    params = packed(40, 31, 25) if is_packed else None
    module(x, None, packed_seq_params=params)
    with torch.no_grad():
        module.core_attention.indexer.linear_weights_proj.weight[1, 0] = NAN
    # A sequence's first queries see no compressed key.
    wrong = TOKENS - 3 * 3 if is_packed and name.startswith("CSA") else TOKENS
    told = rf"layer 2: .*queries of 0 and weights of {wrong} of {TOKENS} query tokens"
    with pytest.raises(ConfigError, match=told):
        module(x, None, packed_seq_params=params)


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_looks_once(name, monkeypatch):
    module = attention_module(MODULES[name]()).train()
    x, norms = hidden_like(module, TOKENS), []
    vector_norm = torch.linalg.vector_norm

    def counted(*args, **kwargs):
        norms.append(args)
        return vector_norm(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    module(x, None)[0].sum().backward()
    assert len(norms) == 3


def test_a_replayed_selection_does_not_hide_it():
    from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay

    module = attention_module(MODULES["DSA, sparse"]()).train()
    x, capture = hidden_like(module, TOKENS), IndexCapture()
    with capture.on(module):
        module(x, None)
    with torch.no_grad():
        module.core_attention.indexer.linear_wk.weight[0] = NAN
    with (
        pytest.raises(ConfigError, match=f"layer 1: .*keys of {TOKENS} of {TOKENS} key tokens"),
        IndexReplay(capture.microbatches).on(module),
    ):
        module(x, None)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_waits_for_the_gpu(layout, dtype):
    layout = LAYOUTS[layout](torch.device("cuda"))
    queries, keys = seen(layout)
    inputs = draw(layout, dtype)
    if layout.real is not None:
        inputs.q[~queries], inputs.weights[~queries], inputs.k[~keys] = NAN, INF, NAN
    never_waits(lambda: require_finite_scores(inputs, layout, "here"))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "weights"])
def test_the_gpu_asserts(name):
    program = f"""
        import torch
        from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
        from megatron_dsa.ops.layout.layout import bshd_layout

        def ones(*shape):
            return torch.ones(shape, dtype=torch.bfloat16, device="cuda")

        inputs = IndexerInputs(ones(4096, 32, 128), ones(4096, 128), ones(4096, 32))
        layout = bshd_layout(4096, 1, torch.device("cuda"))
        indexer_topk(inputs, layout, 64)
        torch.cuda.synchronize()
        print("fine", flush=True)
        inputs.{name}[1234, ..., 3] = float("nan")
        indexer_topk(inputs, layout, 64)
        torch.cuda.synchronize()
        print("not seen", flush=True)
    """
    check_device_assert(
        program, "indexer_topk: index scores are NaN or infinite: check the indexer's"
    )
