"""Multi-token prediction on streams: a whole small V4 against float64, and its parts."""

import pytest
import torch

from tests.helpers import relative_error
from tests.host import small_csa_config, start
from tests.reference import streams_float64
from tests.reference.csa_float64 import Shape

VOCABULARY, LENGTH, BATCH = 61, 40, 2
RATIOS = [0, 4, 16]


def config_of(layers=1, **changes):
    """Three layers of V4's kinds, and prediction layers of CSA and of the window alone."""
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
    """The model, with random values where the initial ones are constant."""
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
    """Megatron's, which computes in fp32, in the dtype of the logits: ``[b, s]``."""
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
    """Losses of the reference, and the gradient of every parameter; rows are sequences."""
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


def step(model, ids, labels, mask, packed=None):
    """Losses and gradients of one step of the model, and the tracked losses of prediction."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    model.zero_grad()
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    loss = model(
        ids, positions, None, labels=labels, loss_mask=mask, packed_seq_params=packed
    )  # fmt: skip
    ((loss * mask).sum() / loss.numel()).backward()
    tracked = MTPLossLoggingHelper.tracker["loss_values"].clone()
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
    """Losses and every gradient; the second layer takes the streams of the first."""
    model = model_of(config_of(layers, **RECOMPUTE[recomputed]))
    ids, labels, mask = batch_of()
    want = expected(model, list(ids), list(labels), list(mask))
    compare(step(model, ids, labels, mask), want, 1e-9)
