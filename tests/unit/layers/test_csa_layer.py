"""Hybrid attention against an independent float64 reference: outputs, loss, all gradients
(``tests/reference/csa_float64.py``).
"""

from dataclasses import replace

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.cases import against_float64
from tests.cases.layers import in_small_blocks
from tests.host import attention_module, small_csa_config
from tests.reference import csa_float64
from tests.reference.shapes import csa_shape

SEQUENCE = 96  # CSA: 24 compressed keys, more than 4 x topk; several windows

YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip


def compare(config, *, loss=None, batch=1, seq_lengths=None, rows=SEQUENCE, tolerance=1e-9):
    def reference(weights, x):
        return csa_float64.attention_layer(
            weights, x, csa_shape(config), loss=loss, seq_lengths=seq_lengths,
            mode="sparse" if config.dsa.stage == "sparse" else "dense",
            teacher="compressed" if config.dsa.csa_teacher == "compressed" else "all",
        )  # fmt: skip

    return against_float64.compare(
        config, reference, tolerance, loss=loss, tokens=rows, batch=batch, lengths=seq_lengths,
        unused=True,
    )  # fmt: skip


DENSE = DSAOptions(stage="dense")
WARMUP = DSAOptions(stage="warmup", freeze_main=False)
IN_BLOCKS = DSAOptions(recompute="queries")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ratio", [0, 4, 128, 6])
def test_layer(ratio, batch):
    rows = 160 if ratio == 128 else SEQUENCE
    module, _ = compare(
        small_csa_config(ratio), loss="sparse" if ratio == 4 else None, batch=batch, rows=rows
    )
    names = dict(module.named_parameters())
    assert ("core_attention.compressor.ape" in names) == (ratio > 0)
    assert ("core_attention.indexer.linear_wq_b.weight" in names) == (ratio == 4)


CSA = {
    "dense loss": ({"dsa_indexer_use_sparse_loss": False}, None, "dense"),
    "no loss": ({"dsa_indexer_loss_coeff": 0.0}, None, None),
    "dense": ({}, DENSE, None),
    "warmup": ({"dsa_indexer_use_sparse_loss": False}, WARMUP, "dense"),
    "teacher of compressed keys, sparse": ({}, DSAOptions(csa_teacher="compressed"), "sparse"),
    "teacher of compressed keys, dense": (
        {"dsa_indexer_use_sparse_loss": False}, DSAOptions(csa_teacher="compressed"), "dense",
    ),
    "no relu, no hadamard": (
        {"dsa_indexer_scoring_relu": False, "dsa_indexer_rotate_activation": False}, None, "sparse",
    ),
    "yarn": (YARN, None, "sparse"),
    "one group": ({"o_groups": 1}, None, "sparse"),
    "as many groups as heads": ({"o_groups": 4}, None, "sparse"),
    "eight heads": ({"num_attention_heads": 8}, None, "sparse"),
    "window longer than the sequence": ({"csa_window_size": 500}, None, "sparse"),
    "window of one": ({"csa_window_size": 1}, None, "sparse"),
    "more selected than there is": ({"dsa_indexer_topk": 50}, None, "sparse"),
    "small workspace": ({}, DSAOptions(workspace_bytes=2**20), "sparse"),
    "queries computed again": ({}, in_small_blocks(IN_BLOCKS), "sparse"),
    "queries computed again, teacher of compressed keys": (
        {}, in_small_blocks(replace(IN_BLOCKS, csa_teacher="compressed")), "sparse",
    ),
    "queries computed again, dense": ({}, in_small_blocks(replace(IN_BLOCKS, stage="dense")), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CSA)
def test_csa(case):
    changes, options, loss = CSA[case]
    compare(small_csa_config(4, options=options, **changes), loss=loss, batch=2)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("ratio", [0, 4, 9])
def test_packed_sequences_do_not_see_each_other(ratio, stage):
    options = WARMUP if stage == "warmup" else None
    changes = {"dsa_indexer_use_sparse_loss": stage == "sparse"}
    lengths = [3, 60, 0, 6, 1, 45]
    loss = {"sparse": "sparse", "warmup": "dense"}[stage] if ratio == 4 else None
    compare(
        small_csa_config(ratio, options=options, **changes), loss=loss, seq_lengths=lengths,
        rows=sum(lengths),
    )  # fmt: skip


def test_nothing_is_long_enough_to_be_compressed():
    config = small_csa_config(4)
    compare(config, loss="sparse", rows=3)
    compare(config, loss="sparse", seq_lengths=[2, 3, 1], rows=6)


@pytest.mark.parametrize("ratio", [0, 4, 9])
def test_fp32(ratio):
    config = small_csa_config(ratio, dtype=torch.float32)
    compare(config, loss="sparse" if ratio == 4 else None, tolerance=1e-5)


def test_a_configuration_that_was_changed_is_refused_by_name():
    """The rules must be checked before the ratios are read."""
    from megatron_dsa.errors import ConfigError

    config = small_csa_config(4)
    config.csa_compress_ratios = [4]
    with pytest.raises(ConfigError, match="csa-compress-ratios"):
        attention_module(config)
