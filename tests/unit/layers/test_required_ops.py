"""Declared operations of a layer against the calls of real steps."""

import pytest
import torch

from megatron_dsa.layers.from_megatron import forget_layouts
from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
from tests.cases.calls import of_any_batch, recorded_calls
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start

#: Fields of the small configurations outside of a model's structure.
OWN = {
    "num_layers", "mtp_num_layers", "hidden_size", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "o_groups", "o_lora_rank",
    "csa_compress_ratios", "csa_window_size", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
    "dsa_indexer_topk",
}  # fmt: skip
#: Options, then fields of the configuration.
SETTINGS = {
    "dense": ({"stage": "dense"}, {"dsa_indexer_loss_coeff": None}),
    "warm-up": ({"stage": "warmup"}, {"dsa_indexer_use_sparse_loss": False}),
    "warm-up, all trained": (
        {"stage": "warmup", "freeze_main": False},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "sparse": ({}, {}),
    "sparse, dense loss": ({}, {"dsa_indexer_use_sparse_loss": False}),
    "sparse, frozen indexer": ({}, {"dsa_indexer_loss_coeff": 0.0}),
    "sparse, evaluated": ({"evaluate_indexer": True}, {}),
    "sparse, frozen and evaluated": (
        {"evaluate_indexer": True},
        {"dsa_indexer_loss_coeff": 0.0},
    ),
    "sparse, teacher alone": ({"csa_teacher": "compressed"}, {}),
    "sparse, teacher alone, evaluated": (
        {"csa_teacher": "compressed", "evaluate_indexer": True},
        {},
    ),
    "sparse, engine numerics": ({"indexer_numerics": "deepgemm-fp8"}, {}),
    "visible, dense": (
        {"stage": "dense", "sequence_length": 140},
        {"dsa_indexer_loss_coeff": None},
    ),
    "visible, warm-up": (
        {"stage": "warmup", "sequence_length": 140},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "visible, warm-up, all trained": (
        {"stage": "warmup", "freeze_main": False, "sequence_length": 140},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "sparse, half of the queries": ({"indexer_loss_queries": 0.5}, {}),
    "sparse, half of queries and heads, evaluated": (
        {"indexer_loss_queries": 0.5, "indexer_loss_heads": 0.5, "evaluate_indexer": True},
        {},
    ),
    "warm-up, half of queries and heads": (
        {"stage": "warmup", "indexer_loss_queries": 0.5, "indexer_loss_heads": 0.5},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "sparse, teacher alone, half of the queries": (
        {"csa_teacher": "compressed", "indexer_loss_queries": 0.5},
        {},
    ),
    "pooled": ({"indexer_pool_size": 4}, {}),
    "pooled, masked, evaluated": (
        {"indexer_pool_size": 4, "selected_attention": "masked", "evaluate_indexer": True},
        {},
    ),
    "pooled, dense loss": ({"indexer_pool_size": 4}, {"dsa_indexer_use_sparse_loss": False}),
    "pooled, warm-up": (
        {"indexer_pool_size": 4, "stage": "warmup"},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "sinks, evaluated": (
        {"output_gate": True, "evaluate_indexer": True},
        {"softmax_type": "learnable"},
    ),
    "sinks, masked": (
        {"output_gate": True, "selected_attention": "masked"},
        {"softmax_type": "learnable"},
    ),
    "masked": ({"selected_attention": "masked"}, {}),
    "masked, half of the queries": (
        {"selected_attention": "masked", "indexer_loss_queries": 0.5},
        {},
    ),
    "masked, half of queries and heads, evaluated": (
        {
            "selected_attention": "masked",
            "indexer_loss_queries": 0.5,
            "indexer_loss_heads": 0.5,
            "evaluate_indexer": True,
        },
        {},
    ),
    "masked, dense loss": (
        {"selected_attention": "masked"},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "masked, frozen indexer": ({"selected_attention": "masked"}, {"dsa_indexer_loss_coeff": 0.0}),
    "masked, evaluated": ({"selected_attention": "masked", "evaluate_indexer": True}, {}),
    "masked, frozen and evaluated": (
        {"selected_attention": "masked", "evaluate_indexer": True},
        {"dsa_indexer_loss_coeff": 0.0},
    ),
}


def layers_of(name: str, setting: str):
    """Yield a small attention module per kind of layer of a preset."""
    start()
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.presets import PRESETS

    options, fields = SETTINGS[setting]
    structure = {key: value for key, value in PRESETS[name].items() if key not in OWN}
    settings = {"dtype": torch.float32, "options": DSAOptions(**options)} | structure | fields
    if "pooled" in setting:
        settings |= {"qk_pos_emb_head_dim": 0, "dsa_indexer_rotate_activation": False}
    ratios = PRESETS[name].get("csa_compress_ratios")
    if ratios is None:
        yield attention_module(small_config(**settings))
        return
    for ratio in sorted(set(ratios)):
        yield attention_module(small_csa_config(ratio, **settings))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["v3.2", "glm-5", "v4-flash", "v4-pro"])
def test_what_runs_is_what_is_declared(name, setting, add):
    start()
    from megatron_dsa.layers.required_ops import called_ops

    if "teacher alone" in setting and not name.startswith("v4"):
        pytest.skip("an option of V4")
    if any(word in setting for word in ("masked", "heads", "pooled", "sinks")) and name.startswith(
        "v4"
    ):
        pytest.skip("refused for V4")
    if setting.startswith("visible"):
        if name.startswith("v4"):
            pytest.skip("V4's layers attend to lists of keys")
        for operation in (VISIBLE_BITS, FORWARD, BACKWARD):
            add(operation.name, lambda torchs: torchs)
    forget_layouts()  # a layout keeps its bits
    for module in layers_of(name, setting):
        core = module.core_attention

        def step(module=module):
            module.train()
            out, _ = module(hidden_like(module, 140), None)
            if out.requires_grad:
                out.float().square().sum().backward()

        def evaluation(module=module):
            module.eval()
            with torch.no_grad():
                module(hidden_like(module, 140), None)

        with recorded_calls() as calls:
            step()
            if core.options.evaluate_indexer:
                evaluation()
        ran = of_any_batch(calls)
        declared = of_any_batch(called_ops(core.required_ops(), core.options.policy))
        place = f"{name}, {setting}, ratio {getattr(core, 'ratio', None)}"
        assert not ran - declared, f"{place}: not declared"
        assert not declared - ran, f"{place}: not called"


def test_a_preset_has_every_stage():
    """The list of presets above is complete; GLM-5.3's DSA layers are the pooled settings."""
    from megatron_dsa.config.presets import PRESETS

    assert set(PRESETS) == {"v3.2", "glm-5", "glm-5.3-flash", "v4-flash", "v4-pro"}
