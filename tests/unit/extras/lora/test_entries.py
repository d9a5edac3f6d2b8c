"""Tensors of an adapters' checkpoint: its own, and its base's."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from megatron_dsa.training import checkpoints

BASE = (
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight",
    "mtp.layers.0.eh_proj.weight",
)


@pytest.mark.parametrize(
    ("stage", "mtp", "kept"),
    [("sparse", 1, (0, 1, 2)), ("sparse", None, (0, 1)), ("dense", 1, (0, 2)), ("dense", 0, (0,))],
)
def test_the_base_may_hold_more_than_the_model(stage, mtp, kept, monkeypatch):
    """An export would otherwise look for adapters or indexers that the run lacked."""
    args = Namespace(mtp_num_layers=mtp, dsa_stage=stage, dsa_indexer_loss_coeff=1.0)
    frozen = SimpleNamespace(frozen_entries=lambda _base: dict.fromkeys(BASE, "base"))
    monkeypatch.setattr(checkpoints, "load_extra", lambda *_: frozen)
    monkeypatch.setattr(checkpoints, "base_of", lambda _: "base")
    monkeypatch.setattr(checkpoints, "_saved_args", lambda _: args)
    monkeypatch.setattr(checkpoints, "stored_entries", lambda _: {"adapter": "own"})
    found = checkpoints.entries_of("there")
    assert found == {"adapter": "own"} | {BASE[i]: "base" for i in kept}
