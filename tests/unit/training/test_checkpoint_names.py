"""Names of a GPT's tensors in checkpoints of hybrid models, and vice versa."""

from argparse import Namespace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from tests.host import start

start()
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

from megatron_dsa.training.checkpoint_names import (  # noqa: E402
    arguments_of_gpt,
    other_kind,
    same_under_another_name,
)

PATTERN = "D-|DE/DE"
GPT, HYBRID = Namespace(num_layers=2), Namespace(num_layers=4, hybrid_layer_pattern=PATTERN)
#: Name in a GPT, name in a hybrid model.
PAIRS = [
    ("decoder.layers.1.input_layernorm.weight", "decoder.layers.2.input_layernorm.weight"),
    ("decoder.layers.1.self_attention.linear_proj.weight",
     "decoder.layers.2.self_attention.linear_proj.weight"),
    ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
    ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
    ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
    ("mtp.layers.0.transformer_layer.mlp.router.weight",
     "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.weight"),
    ("mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
     "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_proj.weight"),
    ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight"),
    ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("gpt", "hybrid"), PAIRS)
@pytest.mark.parametrize("prefix", ["", "chained_0.optimizer.state.exp_avg."])
def test_names_both_ways(gpt, hybrid, prefix):
    for saved, pattern, mine, theirs in (
        (GPT, PATTERN, hybrid, gpt),
        (HYBRID, None, gpt, hybrid),
        (None, PATTERN, hybrid, gpt),  # imported weights
    ):
        kind = other_kind(saved, pattern, "folder")
        assert kind.rename(prefix + mine) == prefix + theirs
        assert kind.num_layers == (4 if pattern else 2)


def test_the_same_kind_has_the_same_names():
    assert other_kind(GPT, None, "folder") is None
    assert other_kind(HYBRID, "D-DE/DE", "folder") is None
    assert other_kind(None, None, "folder") is None


def test_a_stack_of_layers_is_read_from_single_ones_and_back():
    """Layers of a GPT may be saved as one tensor, layers of hybrid models never are."""
    name = "decoder.layers.{}self_attention.linear_proj.weight"
    stacked = ShardedTensor.from_rank_offsets(
        name.format(""), torch.zeros(3, 5), (0, 1, 2), prepend_axis_num=1
    )
    alone = ShardedTensor.from_rank_offsets(name.format("2."), torch.zeros(3, 5))
    kind = other_kind(HYBRID, None, "folder")
    found = same_under_another_name(stacked, {alone.key: alone}, kind)
    assert (found.key, found.global_shape, found.global_offset) == (alone.key, (3, 5), (0, 0))
    assert found.prepend_axis_num == 0
    kind = other_kind(GPT, PATTERN, "folder")
    found = same_under_another_name(alone, {stacked.key: stacked}, kind)
    assert (found.key, found.global_offset) == (stacked.key, stacked.global_offset)
    assert found.global_shape == stacked.global_shape and found.prepend_axis_num == 1


def test_a_number_of_the_other_kind_is_another_layer():
    """Hybrid layer 2 is GPT layer 1, even if the checkpoint has a layer 2 of that shape."""
    names = [f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in (1, 2)]
    entries = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(3)) for name in names}
    kind = other_kind(GPT, PATTERN, "folder")
    assert same_under_another_name(entries[names[1]], entries, kind).key == names[0]


@pytest.mark.parametrize(
    ("saved", "pattern", "message"),
    [
        (GPT, "D-D-D-", "must have 2 pairs"),
        (GPT, "DD--", "must then be pairs D- or DE, got DD--"),
        (Namespace(num_layers=3, hybrid_layer_pattern="GD-"), None, "must then be pairs"),
    ],
)
def test_refused(saved, pattern, message):
    with pytest.raises(ConfigError, match=message):
        other_kind(saved, pattern, "folder")


def test_another_number_of_stacked_layers_is_refused():
    entry = ShardedTensor.from_rank_offsets(
        "decoder.layers.mlp.linear_fc2.weight", torch.zeros(3), (0, 0, 3), prepend_axis_num=1
    )
    with pytest.raises(ConfigError, match="--num-layers must be 2, as in the checkpoint, got 3"):
        same_under_another_name(entry, {}, other_kind(HYBRID, None, "folder"))


def test_arguments_of_the_gpt_with_the_same_layers():
    found = arguments_of_gpt(HYBRID)
    assert (found.num_layers, found.moe_layer_freq) == (2, [0, 1])
    assert found.hybrid_layer_pattern is None and HYBRID.num_layers == 4
    assert arguments_of_gpt(GPT) is GPT
