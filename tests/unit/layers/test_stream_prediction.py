"""Multi-token prediction on streams: a whole small V4 against float64, and its parts."""

import pytest
import torch

from tests.cases.calls import recorded_calls
from tests.helpers import relative_error
from tests.host import packed, small_csa_config, start
from tests.reference import streams_float64
from tests.reference.csa_float64 import Shape

VOCABULARY, LENGTH, BATCH = 61, 40, 2
RATIOS = [0, 4, 16]


def config_of(layers=1, **changes):
    """Return three layers of V4's kinds, and prediction layers of CSA and window only."""
    settings = {
        "num_layers": 3,
        "mtp_num_layers": layers,
        "csa_compress_ratios": [*RATIOS, *[4, 0][:layers]],
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "mtp_loss_scaling_factor": 0.3,
        "layernorm_epsilon": 1e-5,
        "init_method": lambda x: torch.nn.init.normal_(x, std=0.2),
    }
    return small_csa_config(4, **settings | changes)


def model_of(config, seed=3):
    """Return the model, with random values instead of constant initial ones."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

    model = GPTModel(
        config, dsa_block_spec(config), VOCABULARY, 256, position_embedding_type="rope",
        mtp_block_spec=dsa_mtp_block_spec(config), share_embeddings_and_output_weights=False,
    ).to(start())  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                values = values * 0.3 + (0 if "base" in name or "sink" in name else 1)
            else:
                values *= 1.5 * parameter.shape[1] ** -0.5
            parameter.copy_(values)
    model.compute_language_model_loss = cross_entropy
    return model.train()


def cross_entropy(labels, logits):
    """Compute Megatron's loss, which is fp32, in the logits' dtype: ``[b, s]``."""
    return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


def batch_of(seed=5):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    ids, labels = (
        torch.randint(VOCABULARY, shape, generator=generator).to(start()) for _ in range(2)
    )
    mask = (torch.rand(shape, generator=generator) < 0.8).to(start(), torch.float64)
    return ids, labels, mask


def shape_of(config, ratio):
    return Shape(
        heads=config.num_attention_heads, hidden=config.hidden_size, q_lora=config.q_lora_rank,
        head_dim=config.v_head_dim, rope=config.qk_pos_emb_head_dim,
        window=config.csa_window_size, ratio=ratio, o_groups=config.o_groups,
        o_lora=config.o_lora_rank, index_heads=config.dsa_indexer_n_heads,
        index_dim=config.dsa_indexer_head_dim, topk=config.dsa_indexer_topk,
        rotary_base=config.rotary_base, compress_rotary_base=config.csa_compress_rotary_base,
        eps=config.layernorm_epsilon, index_rope_interleaved=True,
    )  # fmt: skip


def expected(model, ids, labels, masks):
    """Return the reference's losses, and every parameter's gradient."""
    config = model.config
    reference = streams_float64.Model(
        attention=tuple(shape_of(config, ratio) for ratio in config.csa_compress_ratios),
        layers=config.num_layers,
        streams=config.hc_mult,
        iterations=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        eps=config.layernorm_epsilon,
        prediction_scale=config.mtp_loss_scaling_factor,
        indexer_scale=config.dsa_indexer_loss_coeff,
    )
    params = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    main, predicted, total = streams_float64.losses(params, ids, labels, masks, reference)
    grads = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    return main, predicted, dict(zip(params, grads, strict=True))


def step(model, ids, labels, mask, packing=None):
    """Return losses and gradients of one step, and the tracked prediction losses."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    model.zero_grad()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    loss = model(
        ids, positions, None, labels=labels, loss_mask=mask, packed_seq_params=packing
    )  # fmt: skip
    ((loss * mask).sum() / loss.numel()).backward()
    tracked = MTPLossLoggingHelper.tracker.get("loss_values")
    MTPLossLoggingHelper.tracker.clear()  # sized for the first model
    return loss.detach(), tracked, {n: p.grad for n, p in model.named_parameters()}


def compare(got, want, tolerance):
    loss, tracked, gradients = got
    main, predicted, wanted = want
    assert relative_error(loss.flatten(), main) < tolerance
    assert relative_error(tracked, torch.stack(predicted)) < max(tolerance, 1e-6)  # kept in fp32
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        assert gradient is not None and gradient.norm() > 0, name
        assert relative_error(gradients[name], gradient) < tolerance, name


RECOMPUTE = {
    "nothing": {},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mla_up_proj", "mlp"],
    },
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("recomputed", RECOMPUTE)
def test_model_against_the_reference(layers, recomputed):
    model = model_of(config_of(layers, **RECOMPUTE[recomputed]))
    ids, labels, mask = batch_of()
    want = expected(model, list(ids), list(labels), list(mask))
    compare(step(model, ids, labels, mask), want, 1e-9)


def test_packed_sequences_are_predicted_apart():
    lengths = [25, 3, 40, 12]
    model = model_of(config_of(2))
    ids, labels, mask = (row.reshape(1, -1) for row in batch_of())
    rows = [list(x[0].split(lengths)) for x in (ids, labels, mask)]
    compare(step(model, ids, labels, mask, packed(*lengths)), expected(model, *rows), 1e-9)


def test_repeated_layer():
    """It must equal two layers with shared weights and summed gradients."""
    ratios = {"csa_compress_ratios": [*RATIOS, 4, 4]}
    two = model_of(config_of(2, **ratios))
    one = model_of(config_of(2, mtp_use_repeated_layer=True, **ratios))
    weights = one.state_dict()
    again = {n.replace("layers.0", "layers.1"): p for n, p in weights.items() if "mtp" in n}
    two.load_state_dict({**weights, **again})
    batch = batch_of()
    loss, tracked, gradients = step(one, *batch)
    want_loss, want_tracked, wanted = step(two, *batch)
    assert torch.equal(loss, want_loss) and torch.equal(tracked, want_tracked)
    for name, gradient in gradients.items():
        summed = wanted[name]
        if name.startswith("mtp."):
            summed = summed + wanted[name.replace("layers.0", "layers.1")]
        assert relative_error(gradient, summed) < 1e-11, name


def test_detached_prediction_trains_itself_alone():
    """``--mtp-detach-heads``: the main model must learn as without prediction."""
    alone = model_of(config_of(None, csa_compress_ratios=RATIOS))
    model = model_of(config_of(2, mtp_detach_heads=True))
    model.load_state_dict(alone.state_dict(), strict=False)
    batch = batch_of()
    loss, _, gradients = step(model, *batch)
    want, _, wanted = step(alone, *batch)
    assert torch.equal(loss, want)
    for name, gradient in wanted.items():
        assert relative_error(gradients[name], gradient) < 1e-11, name
    own = [g for name, g in gradients.items() if name.startswith("mtp.")]
    assert all(gradient.norm() > 0 for gradient in own)


def test_names_dtypes_and_marks():
    """In a 16-bit model only connections are fp32; replicated parameters sum their gradients."""
    from megatron.core.transformer.module import Float16Module

    config = config_of(dtype=torch.bfloat16, bf16=True)
    config.sequence_parallel = True
    (layer,) = Float16Module(config, model_of(config)).module.mtp.layers
    parameters = dict(layer.named_parameters())
    own = {name for name in parameters if not name.startswith("mtp_model_layer.")}
    assert own == {f"{part}.weight" for part in ("enorm", "hnorm", "e_proj", "h_proj")} | {
        f"final_layernorm.{part}" for part in ("weight", "hc_head_fn", "hc_head_base")
    } | {"final_layernorm.hc_head_scale"}  # fmt: skip
    assert {name for name in parameters if "hc_attn" in name or "hc_ffn" in name} == {
        f"mtp_model_layer.hc_{kind}_{part}"
        for kind in ("attn", "ffn") for part in ("fn", "base", "scale")
    }  # fmt: skip
    for name, parameter in parameters.items():
        fp32 = "hc_" in name or name.endswith((".ape", "attn_sink"))
        assert parameter.dtype == (torch.float32 if fp32 else torch.bfloat16), name
        assert name not in own or parameter.sequence_parallel


def test_calls_are_those_declared():
    from megatron_dsa.layers.required_ops import stream_ops

    model = model_of(config_of(2))
    with recorded_calls("hyper_connection") as got:
        step(model, *batch_of())
    layer, head = (
        [(op.operation, op.call) for op in stream_ops(model.config, head=head)]
        for head in (False, True)
    )
    assert got == 3 * 2 * layer + head + 2 * (2 * layer + head)


def test_evaluation_is_the_forward_of_training():
    model = model_of(config_of(2, **RECOMPUTE["full"]))
    ids, labels, mask = batch_of()
    trained = step(model, ids, labels, mask)[0]
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    with torch.no_grad():
        loss = model.eval()(ids, positions, None, labels=labels, loss_mask=mask)
    assert torch.equal(loss, trained)


def test_what_the_main_head_hands_on():
    from megatron_dsa.layers.v4.hyper_connections import StreamsHead
    from megatron_dsa.layers.v4.stream_prediction import HeadBeforePrediction

    config = config_of()
    settings = {
        "config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon,
    }  # fmt: skip
    head, plain = HeadBeforePrediction(**settings), StreamsHead(**settings)
    plain.load_state_dict(head.state_dict())
    streams = torch.randn(5, 2, 4 * config.hidden_size, dtype=torch.float64).to(start())
    both = head(streams)
    assert both.shape == (5 * 5, 2, config.hidden_size) and both._base is None
    assert torch.equal(both[:5], plain(streams))
    assert torch.equal(both[5:].view(streams.shape), streams)


def test_blocks_of_other_models_are_megatrons():
    """The patch must change models with streams only."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from megatron_dsa.layers.v4.stream_prediction import StreamPredictionBlock

    assert type(model_of(config_of()).mtp) is StreamPredictionBlock
    plain = model_of(config_of(hc_mult=1)).mtp
    assert type(plain) is MultiTokenPredictionBlock and hasattr(plain.layers[0], "eh_proj")


@pytest.mark.parametrize(
    ("layout", "apart"),
    [("Ettt|mL", True), ("Ett|tmL", False), ("Et|tt|m|L", True), ("Et|ttm|L", False)],
)
def test_stages_that_predict_apart(layout, apart):
    from megatron_dsa.config.rules.hyper_connections import predicts_apart

    config = config_of(
        pipeline_model_parallel_size=layout.count("|") + 1, pipeline_dtype=torch.float64,
        pipeline_model_parallel_layout=layout,
    )  # fmt: skip
    assert predicts_apart(config) == apart


def test_a_last_stage_with_the_loss_alone_predicts_apart():
    from megatron_dsa.config.rules.hyper_connections import predicts_apart

    for layers, apart in ((3, True), (7, False)):
        config = config_of(
            num_layers=layers, csa_compress_ratios=[4] * (layers + 1),
            pipeline_model_parallel_size=4, pipeline_dtype=torch.float64,
            account_for_loss_in_pipeline_split=True,
        )  # fmt: skip
        assert predicts_apart(config) == apart
