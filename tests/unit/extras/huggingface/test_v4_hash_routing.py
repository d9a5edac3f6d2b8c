"""A whole V4, with hyper-connections and hash routing, equals that of transformers."""

import json

import pytest
import torch

from megatron_dsa.extras.huggingface.convert import import_model, model_tensors
from tests.helpers import relative_error
from tests.tiny_models import logits_of, published, tiny_model, tiny_v4

pytest.importorskip("safetensors")

#: transformers knows no ratios but 0, 4 and 128.
LAYERS = {
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip


def test_logits_equal_those_of_transformers(tmp_path):
    """Weights and tables put in by hand; without hash routing it is another model."""
    config = tiny_v4(hc_mult=2, **LAYERS)
    for name in ("compress_ratios", "num_hash_layers"):
        del config[name]
    theirs = published(config, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    plain = tiny_model(config | {"mlp_layer_types": ["moe"] * 4})
    import_model(plain, tmp_path, without=["hyper-connections", "hash-routing"])
    settings = {name: config[name] for name in ("hc_mult", "hc_eps", "hc_sinkhorn_iters")}
    learned = tiny_model(config, **settings)
    ours = tiny_model(config, moe_hash_layers=2, **settings)
    given = dict(model_tensors(plain))
    generator = torch.Generator().manual_seed(3)
    for layer, their_layer in enumerate(theirs.model.layers):
        prefix = f"decoder.layers.{layer}."
        for kind, module in (("attn", their_layer.attn_hc), ("ffn", their_layer.ffn_hc)):
            for part, tensor in module.named_parameters():
                given[f"{prefix}hc_{kind}_{part}"] = tensor
        if layer < 2:
            gate = their_layer.mlp.gate
            drawn = torch.rand(70, gate.num_experts, generator=generator).argsort(1)
            gate.tid2eid.copy_(drawn[:, : gate.top_k])
            # Ids of the padding never come.
            rows = torch.arange(gate.top_k).expand(80, -1).clone()
            rows[:70] = gate.tid2eid
            given[f"{prefix}mlp.router.tid2eid"] = rows
    for name, tensor in theirs.model.hc_head.named_parameters():
        given["decoder.final_layernorm." + name.replace("hc_", "hc_head_")] = tensor
    mine = dict(model_tensors(ours))
    assert set(given) - set(mine) == {f"decoder.layers.{n}.mlp.router.expert_bias" for n in (0, 1)}
    with torch.no_grad():
        for model in (ours, learned):
            for name, tensor in model_tensors(model):
                tensor.copy_(given[name])
    ids = torch.randint(0, 70, (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = theirs(ids).logits
    error = relative_error(logits_of(ours, ids), reference)
    print(f"logits of deepseek_v4 with hash routing: {error:.1e}")
    assert error < 1e-5
    assert relative_error(logits_of(learned, ids), reference) > 1e-2
