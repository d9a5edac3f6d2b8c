"""Loss scaling, freezing, delayed weight gradients, rotations, synchronisation."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.layers.freezing import freeze_for_stage
from tests.cases.calls import delayed_linears
from tests.cases.models import forward, full, gpt
from tests.cases.steps import selective
from tests.helpers import leaf, never_waits, relative_error
from tests.host import (
    attention_module,
    hidden_like,
    packed,
    small_config,
    small_csa_config,
    start,
)
from tests.reference import dsa_float64


def indexer_gradients(module, x):
    module.zero_grad()
    out, _ = module(x, None)
    out.sum().backward()
    return [p.grad.clone() for p in module.core_attention.indexer.parameters()]


def test_loss_scale_reaches_only_the_indexer():
    """Megatron's factor (loss scale / microbatches) must multiply only the indexer's gradient."""
    config = small_config()
    module = attention_module(config).train()
    x = hidden_like(module, 64)
    plain = indexer_gradients(module, x)
    main = module.linear_proj.weight.grad.clone()
    config.experimental_attention_variant_loss_scale_func(torch.tensor(0.25))
    for scaled, unscaled in zip(indexer_gradients(module, x), plain, strict=True):
        assert relative_error(scaled, unscaled * 0.25) < 1e-12
    assert torch.equal(module.linear_proj.weight.grad, main)


def test_loss_scales_are_kept_apart_between_models():
    first, second = (attention_module(small_config()).train() for _ in range(2))
    first.config.experimental_attention_variant_loss_scale_func(torch.tensor(0.0))
    x = hidden_like(first, 64)
    assert all(g.norm() == 0 for g in indexer_gradients(first, x))
    assert all(g.norm() > 0 for g in indexer_gradients(second, x))


def test_per_token_loss_is_the_sum():
    x = None
    grads = []
    for per_token in (False, True):
        module = attention_module(small_config(calculate_per_token_loss=per_token)).train()
        x = hidden_like(module, 64) if x is None else x
        grads.append(indexer_gradients(module, x))
    for mean, total in zip(*grads, strict=True):
        assert relative_error(total, mean * 64) < 1e-12


def test_delayed_weight_gradients_include_the_indexer():
    """``backward_dw`` must reach every linear that ran, and no other."""
    called = delayed_linears(attention_module(small_config()).train())
    indexer = "core_attention.indexer."
    assert set(called) == {
        "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj",
        f"{indexer}linear_wq_b", f"{indexer}linear_wk", f"{indexer}linear_weights_proj",
    }  # fmt: skip
    assert len(called) == len(set(called))


@pytest.mark.parametrize("freeze", [True, False])
def test_warmup_freezes_everything_but_the_indexers(freeze):
    options = DSAOptions(stage="warmup", freeze_main=freeze)
    model = gpt(small_config(dtype=torch.float32, options=options))
    router = torch.nn.Module()
    router.frozen_expert_bias = False  # like Megatron's routers
    model.router = router
    freeze_for_stage([model])
    assert router.frozen_expert_bias == freeze
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if not freeze:
        assert trained == {name for name, _ in model.named_parameters()}
        return
    assert len(trained) == 10 and all(".indexer." in name for name in trained)
    forward(model, 1).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in trained), name


@pytest.mark.parametrize("mtp", [None, 1])
def test_a_frozen_model_has_no_gradient_of_its_logits(mtp):
    """Its backward must compute nothing of vocabulary width."""
    found = {}
    for freeze in (True, False):
        options = DSAOptions(stage="warmup", freeze_main=freeze)
        # No other size is a multiple of 97.
        model = gpt(small_config(options=options, mtp_num_layers=mtp), vocabulary=97)
        freeze_for_stage([model])
        loss = forward(model, 1)
        with Sizes() as sizes:
            loss.backward()
        found[freeze] = loss.detach(), [size for size in sizes.found if size % 97 == 0]
    assert torch.equal(found[True][0], found[False][0])
    assert found[False][1] and not found[True][1]


class Sizes(TorchDispatchMode):
    """Sizes of operations' result storages, in elements."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel():
            self.found.add(result.untyped_storage().nbytes() // result.element_size())
        return result


RECOMPUTE = {
    "nothing": {},
    "selective": selective(("core_attn", "mla_up_proj")),
    "full": full(1),
}
V4 = {"csa_compress_ratios": [4, 0, 4, 4, 4]}
STREAMS = {"hc_mult": 4, "normalization": "RMSNorm"}
MODELS = {
    "dsa": (small_config, {}), "dsa, streams": (small_config, STREAMS),
    "v4": (functools.partial(small_csa_config, 4), V4),
    "v4, streams": (functools.partial(small_csa_config, 4), V4 | STREAMS),
}  # fmt: skip


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", MODELS)
def test_indexers_learn_the_same_in_a_frozen_model(name, recompute):
    make, fields = MODELS[name]
    gradients = []
    for freeze in (True, False):
        options = DSAOptions(stage="warmup", freeze_main=freeze)
        config = make(
            options=options, num_layers=3, mtp_num_layers=2, **fields, **RECOMPUTE[recompute]
        )
        model = gpt(config)
        freeze_for_stage([model])
        with torch.no_grad():
            forward(model.eval(), 1)
        forward(model.train(), 1).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    frozen, trained = gradients
    learning = {each for each in trained if ".indexer." in each}
    assert set(frozen) == learning and len(learning) >= 4 * 5
    assert any(each.startswith("mtp.layers.1.") for each in learning)
    for each in learning:
        assert frozen[each].norm() > 0
        assert relative_error(frozen[each], trained[each]) < 1e-12, each


def test_hadamard_is_the_reference_transform():
    from megatron_dsa.layers.rope import hadamard

    x = leaf(5, 3, 16, seed=1, dtype=torch.float64).detach()
    expected = dsa_float64.hadamard(x)
    assert relative_error(hadamard(x), expected) < 1e-14
    assert relative_error(hadamard(hadamard(x)), x) < 1e-14


@pytest.mark.parametrize("interleaved", [True, False])
def test_index_projections_match_the_reference(interleaved):
    """The rotation cancels in the scores, so projections are compared directly."""
    from megatron_dsa.layers.parallel.groups import Ranks
    from megatron_dsa.layers.rope import TokenRope
    from megatron_dsa.ops.layout.layout import bshd_layout
    from tests.reference.shapes import dsa_shape

    config = small_config(dsa_indexer_rope_interleaved=interleaved)
    module = attention_module(config)
    params = {n: p.detach().cpu() for n, p in module.named_parameters()}
    x = hidden_like(module, 64)[:, 0]
    qr = leaf(64, config.q_lora_rank, seed=8, device=x.device, dtype=torch.float64).detach()
    rope = TokenRope(module.rotary_pos_emb, bshd_layout(64, 1, x.device))
    got = module.core_attention.indexer(x[:, None], qr[:, None], rope, Ranks())
    q, k, w = dsa_float64.indexer_inputs(params, x.cpu(), qr.cpu(), dsa_shape(config))
    for a, b in ((got.q, q), (got.k, k), (got.weights, w)):
        assert relative_error(a, b) < 3e-6


def test_health_figures_against_the_full_computation():
    from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_attention
    from megatron_dsa.metrics.health import Attended, selection_health
    from megatron_dsa.ops.layout.layout import bshd_layout

    rows, k, device = 40, 6, start()
    layout = bshd_layout(rows, 1, device)
    integers = torch.Generator().manual_seed(2)
    draw = lambda *s: torch.randint(-1, 2, s, generator=integers).double().to(device)  # noqa: E731
    inputs = IndexerInputs(draw(rows, 2, 4), draw(rows, 4), draw(rows, 2))
    q = leaf(rows, 3, 8, seed=4, device=device, dtype=torch.float64).detach()
    kv = leaf(rows, 8, seed=5, device=device, dtype=torch.float64).detach()
    indices, _ = indexer_topk(inputs, layout, k)
    lse = sparse_attention(q, kv, indices, softmax_scale=0.4, v_dim=8).lse

    def health(lse):
        attended = Attended(inputs, layout, k, layout, q, kv, indices, lse, 0.4)
        return {name: mean.value for name, mean in selection_health(attended, rows, 2**20).items()}

    got = health(lse)
    visible = dsa_float64.causal_mask(rows).to(device)
    p = torch.softmax(
        (torch.einsum("qhd,kd->hqk", q, kv) * 0.4).masked_fill(~visible, float("-inf")), -1
    )
    chosen = torch.zeros(rows, rows + 1, dtype=torch.bool, device=device)
    chosen.scatter_(1, torch.where(indices < 0, rows, indices).long(), True)
    chosen = chosen[:, :rows]
    captured = (p * chosen).sum(-1).mean()
    # Other attended mass (window and sink of hybrid attention) counts as captured.
    other = torch.linspace(-2, 2, rows, dtype=torch.float64, device=device)[:, None].expand(-1, 3)
    logits = torch.einsum("qhd,kd->qhk", q, kv) * 0.4
    mass = logits.exp() * visible[:, None]
    kept = (mass * chosen[:, None]).sum(-1) + other.exp()
    beside = health(torch.logaddexp(lse, other))
    expected = (kept / (mass.sum(-1) + other.exp())).mean()
    assert relative_error(beside["dsa attention mass captured"], expected) < 1e-6
    assert relative_error(got["dsa attention mass captured"], captured) < 1e-6


@pytest.mark.parametrize(
    ("stage", "sparse_loss"), [("sparse", True), ("sparse", False), ("warmup", False)]
)
def test_loss_is_recorded_in_the_backward_and_in_evaluation_on_request(stage, sparse_loss, capsys):
    from megatron_dsa.metrics.log import EVALUATION, IndexerLog

    def recorded():
        return {
            name: float(mean.value[0])
            for name, mean in IndexerLog.reduce().items()
            if mean.count[0] and name.startswith("indexer loss")
        }

    IndexerLog._state.sums = None
    IndexerLog.create(2, start())
    for asked in (True, False):
        config = small_config(
            options=DSAOptions(stage=stage, evaluate_indexer=asked),
            dsa_indexer_use_sparse_loss=sparse_loss,
        )
        module = attention_module(config).train()
        x = hidden_like(module, 64)
        out, _ = module(x, None)
        before = recorded()
        # The sparse loss exists only in the backward, the dense one already in the forward.
        assert bool(before) != sparse_loss
        out.sum().backward()
        trained = recorded() if sparse_loss else before
        assert trained["indexer loss"] > 0
        module.eval()
        with torch.no_grad():
            module(x, None)
        judged = recorded()
        assert set(judged) == ({EVALUATION} if asked else set())
        if asked:
            assert judged[EVALUATION] == pytest.approx(trained["indexer loss"], rel=1e-6)
    IndexerLog.record(0, {EVALUATION: torch.tensor(2.0)})
    total = {}
    IndexerLog.log(7, total, skipped=False)
    assert total == {}
    assert f"{EVALUATION} (before iteration 7): 2.000000E+00" in capsys.readouterr().out
    IndexerLog._state.sums = None


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sparse", "warmup", "dense"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_no_host_synchronisation_in_a_layer(stage, is_packed):
    options = DSAOptions(stage=stage, freeze_main=False, workspace_bytes=2**20)
    module = attention_module(small_config(dtype=torch.bfloat16, options=options)).train()
    x = hidden_like(module, 96).bfloat16()
    params = packed(5, 60, 31) if is_packed else None
    torch.use_deterministic_algorithms(False)
    never_waits(lambda: module(x, None, packed_seq_params=params)[0].sum().backward())


def test_key_norm_in_fp32_with_bf16_weights():
    """Only the norm runs in fp32; torch's would reject mixed dtypes."""
    outputs = []
    for fp32 in (False, True):
        config = small_config(dtype=torch.bfloat16, dsa_indexer_k_norm_fp32=fp32)
        indexer = attention_module(config).core_attention.indexer
        k = leaf(32, config.dsa_indexer_head_dim, seed=3, device=start(), dtype=torch.bfloat16)
        outputs.append(indexer._norm_keys(k))
        assert outputs[-1].dtype == torch.bfloat16
    assert relative_error(*outputs) < 1e-2


def test_fp16_gradients_of_the_loss_do_not_underflow():
    """They exist before loss scaling: tiny ones must survive in fp16."""
    from megatron_dsa.dsa_kernels import IndexerInputs, dense_indexer_loss
    from megatron_dsa.ops.layout.layout import bshd_layout

    grads = []
    for dtype in (torch.float16, torch.float64):
        inputs = IndexerInputs(
            *(
                leaf(*shape, seed=seed, device=start(), dtype=torch.float16, scale=scale)
                .detach().to(dtype).requires_grad_()
                for seed, (shape, scale) in enumerate(
                    [((64, 2, 8), 0.02), ((64, 8), 0.02), ((64, 2), 1e-3)]
                )
            )
        )  # fmt: skip
        q = leaf(64, 2, 8, seed=7, device=start(), dtype=torch.float16).detach().to(dtype)
        k = leaf(64, 1, 8, seed=8, device=start(), dtype=torch.float16).detach().to(dtype)
        loss = dense_indexer_loss(inputs, q, k, bshd_layout(64, 1, start()), softmax_scale=0.01)
        (loss * 65536.0).backward()
        grads.append([inputs.q.grad, inputs.k.grad, inputs.weights.grad])
    for half, double in zip(*grads, strict=True):
        assert relative_error(half, double) < 3e-3


def test_checkpoint_names_of_fused_norms():
    """Both ways: transformer-engine fuses the norm into the following linear."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_dsa.training.checkpoint_names import same_under_another_name

    layer = "decoder.layers.1."
    pairs = {
        "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    for wanted, saved in pairs.items():
        entry = ShardedTensor.from_rank_offsets(layer + wanted, torch.zeros(4))
        for stacked in (False, True):
            key = (f"decoder.layers.{saved}") if stacked else layer + saved
            shape = (3, 4) if stacked else (4,)
            there = ShardedTensor.from_rank_offsets(key, torch.zeros(shape))
            found = same_under_another_name(entry, {key: there})
            assert found.key == key and found.global_shape == shape
            assert found.global_offset == ((1, 0) if stacked else (0,))
        assert same_under_another_name(entry, {}) is None
