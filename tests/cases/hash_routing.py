"""Small models with hash layers, and their experts in plain float64 torch."""

import torch
from torch.nn import functional

from tests.host import small_config, small_csa_config, start

VOCABULARY, TOKENS, BATCH = 40, 24, 2
EXPERTS = {
    "num_moe_experts": 5,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "none",
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "gated_linear_unit": True,
    "activation_func": functional.silu,
    "bias_activation_fusion": False,
    "moe_hash_layers": 1,
}


def config_of(kind="dsa", **changes):
    changes = EXPERTS | {"dtype": torch.float32} | changes
    return small_csa_config(4, **changes) if kind == "csa" else small_config(**changes)


def model_of(config, seed=3, scale=0.3):
    """Return a GPT model with random weights large enough to matter."""
    start()
    from megatron_dsa.extras.huggingface.build import gpt_model

    model = gpt_model(config, VOCABULARY, 64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, parameter in sorted(model.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            norm = parameter.dim() == 1
            parameter.copy_(values * (0.1 if norm else scale) + norm)
    return model.to(start()).train()


def ids_of(seed=5, tokens=TOKENS, batch=BATCH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, tokens), generator=generator).to(start())


def run(model, ids, **more):
    """Return losses ``[b, s]`` of a microbatch."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return model(ids, positions, None, labels=ids.roll(-1, 1), **more)


def gradients_of(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def scores_of(logits, chosen, function, pre_softmax=False):
    if function == "softmax":
        if pre_softmax:
            return logits.softmax(1).gather(1, chosen)
        return logits.gather(1, chosen).softmax(1)
    every = logits.sigmoid() if function == "sigmoid" else (1 + logits.exp()).log().sqrt()
    return every.gather(1, chosen)


def experts_float64(x, ids, table, gate, weights, scale):
    """Compute DeepSeek-V4's hash layer, token by token.

    Args:
        x: ``[tokens, C]``; ids: ``[tokens]``; table: ``[vocabulary, topk]``; gate: ``[E, C]``.
        weights: per expert ``(fc1 [2 * F, C], fc2 [C, F])``.
    """
    chosen = table[ids].long()
    scores = scores_of(x @ gate.T, chosen, "sqrtsoftplus")
    share = scale * scores / scores.sum(1, keepdim=True)
    out = []
    for token in range(len(x)):
        parts = []
        for place, expert in enumerate(chosen[token].tolist()):
            fc1, fc2 = weights[expert]
            gated, linear = (fc1 @ x[token]).chunk(2)
            parts.append(share[token, place] * (fc2 @ (gated * gated.sigmoid() * linear)))
        out.append(sum(parts))
    return torch.stack(out)
