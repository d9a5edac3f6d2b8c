"""``info --muon``: what Muon updates in the attention and the residual path of a released model."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from megatron.core.models.gpt import GPTModel

from megatron_dsa import specs
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.presets import AROUND, PRESETS, preset
from megatron_dsa.extras.muon.table import Kind, kinds_of, table_of
from megatron_dsa.extras.planner.attention_only import layers_without_mlp
from megatron_dsa.extras.planner.host import host, ranks
from megatron_dsa.ops.dispatch import choices_unlogged

PerHead = Literal["none", "attention", "all"]
#: One rank.
_ALONE = SimpleNamespace(
    world_size=1,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=None,
    num_distributed_optimizer_instances=1,
)


def released_kinds(name: str, per_head: PerHead = "none") -> Counter[Kind]:
    """Count the parameters of a released model by kind; nothing is allocated.

    Args:
        name: of a preset, which has the attention. MLPs and experts, embedding and output layer
            are left out, and so are layers of multi-token prediction.
        per_head: value of ``--dsa-muon-per-head``.

    Raises:
        ConfigError: an unknown preset.
    """
    released = PRESETS.get(name, {})
    changes: dict[str, Any] = {}
    if "csa_compress_ratios" in released:
        layers = released["num_layers"]
        changes = {
            "csa_compress_ratios": released["csa_compress_ratios"][:layers],
            "hc_mult": AROUND[name]["hc_mult"],
            "mtp_num_layers": None,
        }
    config = preset(
        name, dsa=DSAOptions(muon_per_head=per_head), params_dtype=torch.bfloat16,
        dsa_indexer_loss_coeff=1.0, transformer_impl="local", persist_layer_norm=False,
        gradient_accumulation_fusion=False, perform_initialization=False, **changes,
    )  # fmt: skip
    with (
        choices_unlogged(),
        host(None),
        ranks(_ALONE, 0),
        layers_without_mlp(),
        mock.patch.object(specs, "install_logging"),
        mock.patch.object(specs, "install_throughput"),
    ):
        model = GPTModel(
            config, specs.dsa_block_spec(config), 1, 1, pre_process=False, post_process=True,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        kinds = kinds_of([model], tensor_ranks=1)
    left_out = ("output_layer.", "decoder.layers.*.mlp.")
    return Counter({kind: n for kind, n in kinds.items() if not kind.name.startswith(left_out)})


def describe(name: str, per_head: PerHead = "none") -> str:
    """Return the table of :func:`released_kinds` and what it leaves out."""
    lines = table_of(released_kinds(name, per_head))
    lines.append("and in any model: embedding and output layer by AdamW, MLPs, experts and routers")
    lines.append("by Muon. --optimizer muon prints the list of the whole model at start")
    return "\n".join(lines)
