"""Optimizers of the released models' parameters, in tiny dims; and Megatron's groups."""

import re

import pytest

from tests import host

V4 = {
    "num_layers": 4,
    "csa_compress_ratios": [0, 4, 16, 4],
    "mtp_num_layers": None,
    "csa_window_size": 8,
    "hc_mult": 4,
    "qk_head_dim": 12,
    "v_head_dim": 20,
    "kv_lora_rank": 12,
    "o_lora_rank": 6,
    "rotary_base": 10000,
    "csa_compress_rotary_base": 160000,
    "rotary_scaling_factor": 4,
    "original_max_position_embeddings": 16,
}
#: Preset -> reduced dims: heads, groups, widths of keys and values.
TINY = {
    "v3.2": {"num_attention_heads": 8, "qk_head_dim": 12, "v_head_dim": 12},
    "glm-5": {"num_attention_heads": 4, "qk_head_dim": 12, "v_head_dim": 16},
    "v4-flash": V4 | {"num_attention_heads": 8, "o_groups": 4},
    "v4-pro": V4 | {"num_attention_heads": 16, "o_groups": 8},
}
COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_pos_emb_head_dim": 8,
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 6,
    "dsa_indexer_loss_coeff": 1.0,
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "num_moe_experts": 2,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": 16,
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": True,
}
EMBEDDINGS = {"embedding.word_embeddings.weight", "output_layer.weight"}
ATTENTION = "decoder.layers.*.self_attention."
CORE = f"{ATTENTION}core_attention."
EXPERTS = "decoder.layers.*.mlp."
INDEXER = {f"{CORE}indexer.{name}.weight" for name in ("linear_wq_b", "linear_weights_proj")}
MLP = {f"{EXPERTS}linear_fc1.weight", f"{EXPERTS}linear_fc2.weight", f"{EXPERTS}router.weight"} | {
    f"{EXPERTS}{part}.linear_fc{n}.weight"
    for part in ("experts.local_experts.*", "shared_experts")
    for n in (1, 2)
}
#: Matrices updated by Muon.
MLA = MLP | INDEXER | {f"{CORE}indexer.linear_wk.weight"} | {
    f"{ATTENTION}linear_{name}.weight"
    for name in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
}  # fmt: skip
CSA = MLP | INDEXER | {
    f"{CORE}{part}compressor.linear_{name}.weight"
    for part in ("", "indexer.")
    for name in ("wkv", "wgate")
} | {
    f"{ATTENTION}linear_{name}.weight"
    for name in ("q_down_proj", "q_up_proj", "kv_proj", "o_group_proj", "proj")
} | {
    f"decoder.{name}_fn"
    for name in ("layers.*.hc_attn", "layers.*.hc_ffn", "final_layernorm.hc_head")
}  # fmt: skip
TABLES = {f"{CORE}compressor.ape", f"{CORE}indexer.compressor.ape"}
MATRICES = {name: CSA if "v4" in name else MLA for name in TINY}


def tiny_model(name, per_head="none", **changes):
    host.start()
    from megatron.core.models.gpt import GPTModel

    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.presets import preset
    from megatron_dsa.specs import dsa_block_spec

    settings = COMMON | TINY[name] | changes | {"dsa": DSAOptions(muon_per_head=per_head)}
    settings["moe_layer_freq"] = [0] + [1] * (settings["num_layers"] - 1)
    config = preset(name, **settings)
    return GPTModel(config, dsa_block_spec(config), 96, 64, position_embedding_type="rope",
                    share_embeddings_and_output_weights=False).to(host.start())  # fmt: skip


def plain(name):
    return re.sub(r"\.\d+\.", ".*.", name)


@pytest.mark.parametrize("name", TINY)
def test_muon_updates_matrices_and_adamw_the_rest(name):
    from megatron_dsa.extras.muon.table import kinds_of

    kinds = kinds_of([tiny_model(name)], tensor_ranks=1)
    assert {kind.name for kind in kinds if kind.optimizer == "Muon"} == MATRICES[name]
    left = {kind.name: kind.shape for kind in kinds if kind.optimizer == "AdamW"}
    matrices = {name for name, shape in left.items() if len(shape) > 1}
    assert matrices == EMBEDDINGS | (TABLES if "v4" in name else set())
    vectors = set(left) - matrices
    assert all("norm" in n or n.endswith(("attn_sink", "_base", "_scale")) for n in vectors)
    if "v4" in name:
        assert {plain(f"{CORE}attn_sink"), "decoder.layers.*.hc_attn_base"} <= vectors


@pytest.mark.parametrize("per_head", ["none", "attention", "all"])
@pytest.mark.parametrize("name", TINY)
def test_blocks(name, per_head):
    from megatron_dsa.extras.muon.table import kinds_of

    kinds = kinds_of([tiny_model(name, per_head)], tensor_ranks=1)
    blocks = {kind.name: (kind.blocks, kind.block_rows) for kind in kinds if kind.block_rows}
    dims, expected = COMMON | TINY[name], {}
    heads, v4 = dims["num_attention_heads"], "v4" in name
    if v4:
        expected[f"{ATTENTION}linear_o_group_proj.weight"] = (dims["o_groups"], (6,))
    if per_head != "none":
        query = dims["v_head_dim"] if v4 else dims["qk_head_dim"] + dims["qk_pos_emb_head_dim"]
        expected[f"{ATTENTION}linear_q_up_proj.weight"] = (heads, (query,))
    if per_head != "none" and not v4:
        parts = (dims["qk_head_dim"], dims["v_head_dim"])
        expected[f"{ATTENTION}linear_kv_up_proj.weight"] = (2 * heads, parts)
    if per_head == "all":
        expected[f"{CORE}indexer.linear_wq_b.weight"] = (3, (16,))
    assert blocks == expected


@pytest.mark.parametrize("name", TINY)
def test_megatron_groups_parameters_like_the_table(name):
    pytest.importorskip("emerging_optimizers", minversion="0.3")
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron_dsa.extras.muon.optimizer import BlockMuon, is_left_to_adamw
    from megatron_dsa.layers.weight_blocks import block_rows

    model = tiny_model(name, "all", params_dtype=torch.bfloat16, bf16=True)
    model = Float16Module(model.config, model)
    settings = OptimizerConfig(optimizer="muon", lr=1e-3, min_lr=1e-3, bf16=True)
    optimizer = get_megatron_optimizer(settings, [model])
    updates = {}
    for each in optimizer.chained_optimizers:
        kind = "Muon" if isinstance(each.optimizer, BlockMuon) else "AdamW"
        updates |= {p: kind for group in each.optimizer.param_groups for p in group["params"]}
    names = dict(model.named_parameters())
    assert len(updates) == len(names) > 20
    for name, parameter in names.items():
        main = getattr(parameter, "main_param", parameter)
        assert main.dtype == torch.float32, name
        assert updates[main] == ("AdamW" if is_left_to_adamw(parameter) else "Muon"), name
        assert block_rows(main) == block_rows(parameter), name
    marked = [name for name, parameter in names.items() if block_rows(parameter)]
    assert len(marked) >= 2 * model.config.num_layers


def test_layer_wise_buffers_leave_tables_out():
    model = tiny_model("v4-flash")
    from megatron.core.optimizer import layer_wise_optimizer

    from megatron_dsa.extras.muon.optimizer import is_left_to_adamw

    managed = layer_wise_optimizer.is_managed_by_layer_wise_optimizer
    for name, parameter in model.named_parameters():
        assert managed(parameter) == (not is_left_to_adamw(parameter)), name


def test_table():
    from megatron_dsa.extras.muon.table import kinds_of, table_of

    lines = table_of(kinds_of([tiny_model("v4-flash", "all")], 1))
    assert lines[0].split() == [
        "optimizer",
        "parameters",
        "shape",
        "number",
        "orthogonalised",
        "as",
    ]
    assert lines[1].startswith("AdamW") and "attn_sink" in lines[1] and "hc_attn_base" in lines[1]
    rows = [" ".join(line.split()) for line in lines]
    assert f"Muon {ATTENTION}linear_o_group_proj.weight [24, 40] 4 4 blocks of 6 rows" in rows
    assert f"AdamW {CORE}compressor.ape [4, 40] 2" in rows
    assert f"Muon {EXPERTS}experts.local_experts.*.linear_fc1.weight [96, 32] 6 one matrix" in rows
    assert len(lines) < 40
