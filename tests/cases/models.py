"""Small GPT models with selecting layers: configurations, weights, microbatches."""

import torch

from megatron_dsa.config.model import DSAOptions
from tests.host import small_config, small_csa_config, start

VOCABULARY = 96


def gpt(config, vocabulary=VOCABULARY):
    """Return a GPT model with weights large enough to matter."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

    MTPLossLoggingHelper.tracker.clear()  # sized for the first model
    model = GPTModel(
        config, dsa_block_spec(config), vocabulary, 64, position_embedding_type="rope",
        mtp_block_spec=dsa_mtp_block_spec(config),
    )  # fmt: skip
    model = model.to(start(), config.params_dtype).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values * parameter.shape[1] ** -0.5)
    return model


def tokens(seed, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, 64), generator=generator).to(start())


def forward(model, seed):
    ids = tokens(seed)
    position = torch.arange(64, device=ids.device)[None]
    return model(ids, position, None, labels=ids).mean()


def full(layers):
    """Return the settings of full recomputation, with so many layers at a time."""
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": layers,
    }


CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MASKED = DSAOptions(selected_attention="masked")
MODELS = {
    "DSA": (small_config, (), {"num_layers": 3}),
    "shared": (small_config, (), {"num_layers": 4, "dsa_indexer_topk_freq": 2}),
    "masked": (
        small_config,
        (),
        {"num_layers": 4, "dsa_indexer_topk_freq": 2, "options": MASKED},
    ),
    "hybrid": (
        small_csa_config,
        (4,),
        {"num_layers": 5, "csa_compress_ratios": [4, 0, 4, 6, 4]},
    ),
}
SELECTING = {"DSA": [1, 2, 3], "shared": [1, 3], "masked": [1, 3], "hybrid": [1, 3, 5]}
