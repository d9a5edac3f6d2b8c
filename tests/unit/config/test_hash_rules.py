"""Hash layers: rejected configurations and pipelines."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from tests.cases.hash_routing import config_of

WRONG = {
    r"--moe-hash-layers \(3\) must count layers with experts": {"moe_hash_layers": 3},
    r"--moe-hash-layers \(2\) must count .* --moe-layer-freq": {
        "moe_hash_layers": 2, "moe_layer_freq": [1, 0],
    },
    r"--moe-hash-layers \(2\) must count layers": {"moe_hash_layers": 2, "moe_layer_freq": 2},
    r"--moe-hash-layers \(1\) must count .* give --num-experts": {
        "num_moe_experts": None, "moe_ffn_hidden_size": None,
        "moe_router_enable_expert_bias": False,
    },
    "--moe-hash-layers must be finite and at least 0": {"moe_hash_layers": -1},
    "--moe-hash-seed must be finite and at least 0": {"moe_hash_seed": -1},
    "--moe-router-load-balancing-type must not be sinkhorn with --moe-hash-layers 1": {
        "moe_router_load_balancing_type": "sinkhorn",
    },
    "--cuda-graph-impl must be none with --moe-hash-layers": {
        "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"],
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_refusals_name_the_flag(message):
    with pytest.raises(ConfigError, match=message):
        config_of(**WRONG[message])


#: Layers on the embedding's stage -> division of the pipeline.
STAGES = [
    (8, {}),
    (4, {"pipeline_model_parallel_size": 2}),
    (2, {"pipeline_model_parallel_size": 4}),
    (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    (5, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 5}),
    (1, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
    (
        2,
        {"pipeline_model_parallel_size": 3}
        | {"account_for_embedding_in_pipeline_split": True}
        | {"num_layers": 8},
    ),
    (3, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tttttL"}),
    (0, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttttttttL"}),
    (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        | {"pipeline_model_parallel_layout": "Ett|ttt|tt|tL"},
    ),
]


@pytest.mark.parametrize(("first", "stages"), STAGES)
def test_hash_layers_stand_with_the_embedding(first, stages):
    settings = {"num_layers": 8, "pipeline_dtype": torch.float32} | stages
    for layers in range(1, 9):
        if layers <= first:
            config_of(moe_hash_layers=layers, **settings)
            continue
        with pytest.raises(ConfigError, match=f"first pipeline stage.* has {first} layer"):
            config_of(moe_hash_layers=layers, **settings)
