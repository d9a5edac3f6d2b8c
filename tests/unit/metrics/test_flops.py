"""Counts of operations, against products executed one by one on tiny shapes."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.metrics.flops import TOKEN, Keys, flops, flops_by_part, layer_work, model_work
from megatron_dsa.ops import naive
from megatron_dsa.ops.indexer_loss.training import LatentIndexerInputs
from megatron_dsa.ops.masked_attention.api import MaskedAttentionOutput
from tests.host import attention_module, small_config, small_csa_config, start

SEQUENCE, VOCABULARY = 21, 64
#: Options and fields of a configuration; one indexer is not trained, one loss is dense.
STAGES = {
    "dense": (DSAOptions("dense", health_tokens=0), {}),
    "warmup, frozen": (DSAOptions("warmup", health_tokens=0), {}),
    "warmup, all trained": (DSAOptions("warmup", freeze_main=False, health_tokens=0), {}),
    "sparse": (DSAOptions("sparse", health_tokens=0), {}),
    "sparse, dense loss": (
        DSAOptions("sparse", health_tokens=0), {"dsa_indexer_use_sparse_loss": False},
    ),
    "sparse, masked": (DSAOptions("sparse", health_tokens=0, selected_attention="masked"), {}),
    "sparse, masked, dense loss": (
        DSAOptions("sparse", health_tokens=0, selected_attention="masked"),
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "sparse, output gate": (DSAOptions("sparse", health_tokens=0, output_gate=True), {}),
    "sparse, no loss": (DSAOptions("sparse", health_tokens=0), {"dsa_indexer_loss_coeff": 0.0}),
}  # fmt: skip
RATIOS = [0, 4, 7]
# Rotations of index queries and keys multiply a constant matrix, and do not count.
MODEL = {"num_layers": 3, "dsa_indexer_rotate_activation": False}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20,
    "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 12,
    "gated_linear_unit": True, "moe_router_load_balancing_type": "none",
}  # fmt: skip


def configuration(stage, hybrid, **changes):
    options, fields = STAGES[stage]
    if hybrid and (options.selected_attention == "masked" or options.output_gate):
        pytest.skip("refused for V4")
    if hybrid:
        fields = fields | {"csa_compress_ratios": RATIOS, "dsa_indexer_topk": 3}
        changes = MODEL | fields | changes
        return small_csa_config(4, dtype=torch.float32, options=options, **changes)
    return small_config(dtype=torch.float32, options=options, **MODEL | fields | changes)


@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
@pytest.mark.parametrize("limit", [0, 1, 3, 5, 100])
def test_pairs_are_those_of_a_loop(ratio, limit):
    lengths = range(60)
    expected = [
        sum(min((t + 1) // ratio, limit or length) for t in range(length)) for length in lengths
    ]
    keys = Keys(ratio, limit)
    assert [keys.pairs(length) for length in lengths] == expected
    assert keys.pairs(torch.tensor(lengths)).tolist() == expected


class Products:
    """Executes and counts one head's products, query by query."""

    def __init__(self, heads, dim):
        self.heads, self.dim = heads, dim
        self.count = 0

    def run(self, keys: int, v_dim: int, *, forward: bool, backward: bool):
        """Compute scores of ``keys`` keys, and values of ``v_dim`` dims if any."""
        q = torch.ones(self.heads, self.dim, requires_grad=True)
        k = torch.ones(keys, self.dim, requires_grad=True)
        v = torch.ones(keys, v_dim, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            out = q @ k.T
            out = out @ v if v_dim else out
        self.count += counter.get_total_flops() * forward
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        self.count += counter.get_total_flops() * backward


def pairs_one_by_one(config, number, stage):
    """Count operations on pairs in one layer, from the definition of its kind."""
    hybrid = hasattr(config, "csa_compress_ratios")
    ratio = config.csa_compress_ratios[number - 1] if hybrid else 1
    masked = "masked" in stage
    latent = stage.startswith("sparse") and not hybrid and not masked
    qk = v = config.v_head_dim
    if not hybrid:
        rope, v = config.qk_pos_emb_head_dim, config.kv_lora_rank if latent else v
        qk = (config.kv_lora_rank if latent else config.qk_head_dim) + rope
    indexer = stage != "dense" and ratio == (4 if hybrid else 1)
    if config.dsa_indexer_topk_freq > 1 and stage.startswith("sparse") and number == 2:
        indexer = False  # it reuses the previous selection
    selects = stage.startswith("sparse") and ratio == (4 if hybrid else 1)
    trains_main, dense_loss = stage != "warmup, frozen", stage.endswith("dense loss")
    attention = Products(config.num_attention_heads, qk)
    index = Products(config.dsa_indexer_n_heads, config.dsa_indexer_head_dim)
    for t in range(SEQUENCE):
        visible = [g for g in range(SEQUENCE) if ratio and ratio * (g + 1) - 1 <= t]
        selected = visible[-config.dsa_indexer_topk :] if selects else visible
        window = [s for s in range(t + 1) if t - s < config.csa_window_size] if hybrid else []
        both = len(window) + len(visible if masked else selected)
        attention.run(both, v, forward=True, backward=trains_main)
        if not indexer:
            continue
        index.run(len(visible), 0, forward=True, backward=False)
        if dense_loss and not masked:  # its teacher
            attention.run(len(visible) - len(selected), 0, forward=True, backward=False)
        if stage != "sparse, no loss":
            learnt = visible if dense_loss else selected
            index.run(len(learnt), 0, forward=False, backward=True)
    return attention.count + index.count


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hybrid", [False, True], ids=["dsa", "hybrid"])
def test_pairs_of_every_layer_kind_and_stage(stage, hybrid):
    config = configuration(stage, hybrid)
    for number in range(1, 4):
        work = [w for w in layer_work(config, number) if w.keys != TOKEN]
        counted = flops(work, lambda keys: keys.pairs(SEQUENCE))
        assert counted == pairs_one_by_one(config, number, stage) > 0


def test_a_kda_layer():
    """The naive layer's products; torch writes into a state without one, in three passes."""
    fields = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    fields |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    config = configuration("sparse", False, linear_attention_freq=[1, 0, 1], **fields)
    module = attention_module(config)
    weights = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    x = torch.ones(SEQUENCE, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        naive.kda_layer(x, weights, heads=4).sum().backward()
    written = 3 * 2 * SEQUENCE * 4 * 8 * 8
    work = [w for w in layer_work(config, 1) if w.part in ("projections", "delta rule")]
    counted = flops(work, lambda keys: keys.pairs(SEQUENCE))
    assert counted == counter.get_total_flops() + written
    assert {w.part for w in layer_work(config, 2)} & {"delta rule", "attention"} == {"attention"}


@pytest.mark.parametrize("stage", ["warmup, frozen", "sparse", "sparse, dense loss"])
def test_pairs_with_index_sharing(stage):
    """Layer 2 reuses layer 1's selection only if there is one."""
    config = configuration(stage, False, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1)
    for number in range(1, 4):
        work = [w for w in layer_work(config, number) if w.keys != TOKEN]
        counted = flops(work, lambda keys: keys.pairs(SEQUENCE))
        assert counted == pairs_one_by_one(config, number, stage)


class QueriesMadeAgain(torch.autograd.Function):
    """A product that is skipped, unlike its backward's."""

    @staticmethod
    def forward(ctx, weight, latent):
        ctx.save_for_backward(latent)
        return weight.new_zeros(len(latent), len(weight))

    @staticmethod
    def backward(ctx, grad):
        return grad.t() @ ctx.saved_tensors[0], None


@pytest.fixture
def no_pairs(monkeypatch):
    """Run attention, selection and losses without products: only those with weights remain."""

    def touch(out, *tensors):
        return out + sum(0 * x.sum() for x in tensors)

    def learning(indexer):
        """Return the indexer's tensors; its queries were counted in the selection."""
        if indexer is None:
            return ()
        if isinstance(indexer.inputs, LatentIndexerInputs):
            weight, k, weights, latent, *_ = indexer.inputs.tensors()
            return QueriesMadeAgain.apply(weight, latent), k, weights
        return indexer.inputs.tensors()

    def sparse(q, kv, _keys, *, v_dim, kv_grad=None, indexer=None, **_settings):
        learns = learning(indexer)
        out = touch(q[..., :v_dim], kv, *(() if kv_grad is None else (kv_grad,)), *learns)
        return SimpleNamespace(out=out, lse=torch.zeros(q.shape[:2]), p_sum=None)

    def absorbed(q, kv, weights, _keys, *, recompute, **settings):
        own = q.shape[2] - (kv.shape[1] - weights.shape[2])
        w_uk, w_uv = weights.split([own, weights.shape[1] - own], dim=1)
        q = torch.cat([torch.einsum("tha,har->thr", q[..., :own], w_uk), q[..., own:]], -1)
        result = sparse(q, kv, _keys, v_dim=weights.shape[2], **settings)
        result.out = torch.einsum("thr,hvr->thv", result.out, w_uv)
        return result

    def masked(q, kv, k_pe, _keys, *, softmax_scale, indexer=None, **_settings):
        learns = learning(indexer)
        value = kv[..., q.shape[2] - k_pe.shape[1] :]
        out = touch(value, q, kv, k_pe, *learns)
        return MaskedAttentionOutput(out, torch.zeros(q.shape[:2]), None)

    def select(inputs, _layout, topk, *_ranks, **_settings):
        rows = inputs.q.shape[0]
        chosen = torch.zeros(rows, topk, dtype=torch.int32)
        return chosen, torch.ones(rows, dtype=torch.int32)

    def loss(inputs, *_arguments, **_settings):
        return touch(torch.zeros(()), inputs.q, inputs.k, inputs.weights)

    def dense(q, k, v, *_arguments, **_settings):
        return touch(v, q, k), None

    start()
    monkeypatch.setattr(importlib.import_module("megatron_dsa.layers.core"), "indexer_topk", select)
    for name in ("dsa_core", "csa_core"):
        module = importlib.import_module(f"megatron_dsa.layers.{name}")
        monkeypatch.setattr(module, "dense_indexer_loss", loss)
    core = importlib.import_module("megatron_dsa.layers.csa_core")
    monkeypatch.setattr(core, "sparse_attention", sparse)
    core = importlib.import_module("megatron_dsa.layers.dsa_core")
    monkeypatch.setattr(core, "absorbed_attention", absorbed)
    monkeypatch.setattr(core, "dense_attention", dense)
    monkeypatch.setattr(core, "masked_attention", masked)


def step(config):
    """Return FLOP of a GPT model's forward and backward pass."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.layers.freezing import freeze_for_stage
    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

    model = GPTModel(
        config, dsa_block_spec(config), VOCABULARY, SEQUENCE, position_embedding_type="rope",
        mtp_block_spec=dsa_mtp_block_spec(config),
    ).to(start())  # fmt: skip
    freeze_for_stage([model])
    tokens = torch.arange(SEQUENCE, device=start())[None]
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, tokens, None, labels=tokens)
    with FlopCounterMode(display=False) as backward:
        loss.mean().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("mtp", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("hybrid", [False, True], ids=["dsa", "hybrid"])
def test_products_with_weights(stage, hybrid, mtp, no_pairs):
    changes = EXPERTS | ({"mtp_num_layers": 1} if mtp else {})
    if mtp and hybrid:
        changes["csa_compress_ratios"] = [*RATIOS, 4]
    config = configuration(stage, hybrid, **changes)
    forward, backward = step(config)
    work = [w for w in model_work(config, VOCABULARY) if w.keys == TOKEN]
    once = [w._replace(backward=0) for w in work]
    assert flops(once, lambda _: SEQUENCE) == forward
    if stage == "warmup, frozen":
        # The gradient of the projection before an MTP layer is unused.
        hidden = config.hidden_size
        backward -= 2 * SEQUENCE * hidden * mtp * 2 * hidden
        assert backward > 0
    assert flops(work, lambda _: SEQUENCE) == forward + backward


@pytest.fixture
def no_sums_of_streams(monkeypatch):
    """Hyper-connections without sums of streams, which do not count."""
    module = importlib.import_module("megatron_dsa.ops.hyper_connections.torch")

    def written(output, x, post, comb):
        return output[:, None] + x + 0 * (post.sum() + comb.sum())

    monkeypatch.setattr(module, "_written", written)


def test_products_of_a_whole_v4(no_pairs, no_sums_of_streams):
    changes = EXPERTS | {
        "mtp_num_layers": 1, "csa_compress_ratios": [*RATIOS, 0], "hc_mult": 4,
        "normalization": "RMSNorm", "moe_layer_freq": 1, "moe_hash_layers": 1,
        "moe_hash_vocab_size": VOCABULARY, "moe_router_score_function": "sqrtsoftplus",
    }  # fmt: skip
    config = configuration("sparse", True, **changes)
    forward, backward = step(config)
    work = [w for w in model_work(config, VOCABULARY) if w.keys == TOKEN]
    once = [w._replace(backward=0) for w in work]
    assert flops(once, lambda _: SEQUENCE) == forward
    # The backward's second projection of the streams does not count.
    again = flops_by_part(once, lambda _: SEQUENCE)["hyper-connections"]
    assert flops(work, lambda _: SEQUENCE) == forward + backward - again
    learned = configuration("sparse", True, **changes | {"moe_hash_layers": 0})
    assert model_work(learned, VOCABULARY) == model_work(config, VOCABULARY)


def test_products_of_prediction_on_streams():
    fields = {"mtp_num_layers": 2, "normalization": "RMSNorm"}
    config, plain = (configuration("sparse", False, **fields, hc_mult=n) for n in (4, 1))
    count, single = (flops_by_part(model_work(c, VOCABULARY), lambda _: 1) for c in (config, plain))
    hidden, layers = config.hidden_size, config.num_layers + 2
    assert single["multi-token prediction"] == 2 * 3 * 2 * 2 * hidden**2
    assert count["multi-token prediction"] == 2 * 3 * 2 * 5 * hidden**2
    assert count["hyper-connections"] == 2 * 3 * (layers * 2 * 24 + 3 * 4) * 4 * hidden


def test_parts_sum_up_to_the_whole():
    work = model_work(configuration("sparse", True, **EXPERTS), VOCABULARY)
    parts = flops_by_part(work, lambda keys: keys.pairs(SEQUENCE))
    assert sum(parts.values()) == flops(work, lambda keys: keys.pairs(SEQUENCE))
    assert list(parts.values()) == sorted(parts.values(), reverse=True)
    assert {"attention", "window attention", "index scores", "indexer loss", "experts"} < set(parts)


@pytest.mark.parametrize("stage", ["sparse", "dense", "warmup"])
def test_frozen_weights_have_the_gradient_of_their_input_alone(stage):
    options = DSAOptions(stage, lora_rank=2, lora_targets=("all-linear",))
    plain, lora = (
        {(w.part, w.keys): w for w in layer_work(small_config(options=each), 1)}
        for each in (DSAOptions(stage), options)
    )
    assert plain.keys() == lora.keys()
    for (part, keys), work in lora.items():
        before = plain[part, keys]
        assert work.forward == before.forward
        if keys != TOKEN:
            assert work == before
        elif part == "indexer's projections":
            assert (before.backward, work.backward) == (work.forward, 0)
        else:
            assert work.backward == before.backward / 2 == (stage != "warmup") * work.forward
