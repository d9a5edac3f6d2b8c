"""``info --muon``: Muon's updates in the attention and residual path of a released model."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel

from megatron_dsa import specs
from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.presets import AROUND, PRESETS, preset
from megatron_dsa.extras.muon.table import Kind, kinds_of, table_of
from megatron_dsa.ops.dispatch import choices_unlogged

_ONE_RANK = SimpleNamespace(
    world_size=1,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    num_distributed_optimizer_instances=1,
)
_LEFT_OUT = ("output_layer.", "decoder.layers.*.mlp.")


def released_kinds(
    name: str, per_head: Literal["none", "attention", "all"] = "none"
) -> Counter[Kind]:
    """Count a preset's parameters by kind, without allocating them."""
    released = PRESETS[name]
    streams = ("hc_mult", "hc_collapse")
    changes: dict[str, Any] = {key: AROUND[name][key] for key in streams if key in AROUND[name]}
    if "csa_compress_ratios" in released:
        layers = released["num_layers"]
        changes |= {
            "csa_compress_ratios": released["csa_compress_ratios"][:layers],
            "mtp_num_layers": None,
        }
    config = preset(
        name, dsa=DSAOptions(muon_per_head=per_head), params_dtype=torch.bfloat16,
        dsa_indexer_loss_coeff=1.0, transformer_impl="local", persist_layer_norm=False,
        gradient_accumulation_fusion=False, perform_initialization=False, **changes,
    )  # fmt: skip
    planner = load_extra("planner.host", "info --muon")
    with (
        choices_unlogged(),
        planner.host(None),
        planner.ranks(_ONE_RANK, 0),
        mock.patch.object(specs, "install"),
    ):
        model = GPTModel(
            config, specs.dsa_block_spec(config), 1, 1, pre_process=False, post_process=True,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        kinds = kinds_of([model], tensor_ranks=1)
    return Counter({kind: n for kind, n in kinds.items() if not kind.name.startswith(_LEFT_OUT)})


def describe(name: str, per_head: Literal["none", "attention", "all"] = "none") -> str:
    lines = table_of(released_kinds(name, per_head))
    lines.append("and in any model: embedding and output layer by AdamW, MLPs, experts and routers")
    lines.append("by Muon. --optimizer muon prints the list of the whole model at start")
    return "\n".join(lines)
