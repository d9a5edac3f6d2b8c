"""Context-parallel ranks' tokens, and rejected layouts."""

import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.layout.sharding import CP_LAYOUTS, Sharding
from megatron_dsa.training.data import check_cp_layout, take_tokens

CP = 4
FLAGS = {
    "context_parallel_size": 2,
    "dsa_cp_layout": "zigzag",
    "dataloader_inter_document_masking": False,
    "mtp_num_layers": None,
}


def batch_of(rows, elements=2):
    tokens = torch.arange(rows * elements).view(elements, rows)
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": None, "max_seqlen": rows}


@pytest.mark.parametrize("rank", range(CP))
def test_zigzag_is_megatrons(rank, monkeypatch):
    from megatron.core import utils

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    group = SimpleNamespace(size=CP, rank=rank)
    theirs, ours = batch_of(32), batch_of(32)
    theirs.pop("max_seqlen")
    theirs = utils.get_batch_on_this_cp_rank(theirs, is_hybrid_cp=False, cp_group=group)
    take_tokens(ours, Sharding(cp=CP, cp_rank=rank))
    for key in ("tokens", "labels"):
        assert ours[key].equal(theirs[key])
    assert ours["loss_mask"] is None and ours["max_seqlen"] == 32


@pytest.mark.parametrize("layout", CP_LAYOUTS)
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 8, 8, 24, 64])], ids=["one", "packed"])
def test_every_token_is_on_one_rank(layout, offsets):
    held = []
    for rank in range(CP):
        batch = batch_of(64, 1)
        take_tokens(batch, Sharding(cp=CP, cp_rank=rank, cp_layout=layout), offsets)
        assert batch["labels"].equal(batch["tokens"] + 1)
        held.append(batch["tokens"][0])
    assert torch.cat(held).sort().values.equal(torch.arange(64))
    if layout == "zigzag" and offsets is not None:
        assert held[1].tolist() == [1, 6, 10, 11, 20, 21, *range(29, 34), *range(54, 59)]


@pytest.mark.parametrize(
    ("changes", "rule", "fix"),
    [
        ({"dataloader_inter_document_masking": True}, "zigzag_rows", "Add --dsa-cp-layout"),
        (
            {
                "dataloader_inter_document_masking": True,
                "dsa_cp_layout": "zigzag_rows",
                "mtp_num_layers": 1,
            },
            "--mtp-num-layers must be unset",
            "or pass --mtp-num-layers 0",
        ),
        (
            {"dsa_cp_layout": "contiguous", "mtp_num_layers": 1},
            "--mtp-num-layers must be unset",
            "Use --dsa-cp-layout zigzag",
        ),
    ],
)
def test_refusals(changes, rule, fix):
    with pytest.raises(ConfigError, match=rule) as refusal:
        check_cp_layout(argparse.Namespace(**FLAGS | changes))
    assert fix in str(refusal.value)
    check_cp_layout(argparse.Namespace(**FLAGS | changes | {"context_parallel_size": 1}))


@pytest.mark.parametrize("layout", ["zigzag_rows", "contiguous"])
def test_documents_of_any_length_fit_in_every_stage(layout):
    changes = {"dataloader_inter_document_masking": True, "dsa_cp_layout": layout}
    for stage in ("dense", "warmup", "sparse"):
        check_cp_layout(argparse.Namespace(**FLAGS | changes, dsa_stage=stage))
