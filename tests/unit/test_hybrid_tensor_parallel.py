"""Hybrid attention on two tensor-parallel ranks equals one rank: window, CSA and HCA layers."""

import dataclasses

import pytest

from megatron_dsa.config import DSAOptions
from tests.ranks import Case, compare, run

#: A rank has 47 rows: groups of 4 and of 6 positions cross from one rank to the other, and the
#: last positions fill no group.
BASE = Case(
    config="small_hybrid_config",
    selector="csa_core",
    by_rows=("linear_q_up_proj", "attn_sink", "linear_o_group_proj"),
    by_columns=("linear_proj",),
    rows=94,
)
WARMUP = DSAOptions(stage="warmup", freeze_main=False)
OLD_TEACHER = DSAOptions(csa_teacher="compressed")


def layer(ratio, **changes):
    """A case with layers of ``ratio``; fields of :class:`Case` and of the configuration."""
    fields = {field.name for field in dataclasses.fields(Case)}
    own = {name: value for name, value in changes.items() if name in fields}
    config = {name: value for name, value in changes.items() if name not in fields}
    return dataclasses.replace(BASE, arguments=(ratio,), changes=config, **own)


CASES = {
    "window": layer(0),
    "CSA": layer(4),
    "HCA": layer(6),
    "CSA, two sequences": layer(4, batch=2),
    "HCA, two sequences": layer(6, batch=2),
    # The third sequence is on both ranks, the second is shorter than a group.
    "CSA, packed": layer(4, lengths=(30, 3, 40, 21)),
    "HCA, packed": layer(6, lengths=(30, 3, 40, 21)),
    "CSA, dense loss": layer(4, dsa_indexer_use_sparse_loss=False),
    "CSA, teacher of compressed keys": layer(4, options=OLD_TEACHER),
    "CSA, warm-up": layer(4, options=WARMUP, dsa_indexer_use_sparse_loss=False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one rank and what two ranks computed, for all cases."""
    with pytest.MonkeyPatch.context() as patch:
        # On the CPU also where there is a GPU: NCCL wants one GPU per rank.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        folder = tmp_path_factory.mktemp("ranks")
        return run(CASES, 1, folder)[0], run(CASES, 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name, results):
    one, two = results
    compare(CASES[name], one[name], [rank[name] for rank in two])
    selects = name.startswith("CSA") and "warm-up" not in name
    assert len(one[name]["indices"]) == selects
    compressor = {"compressor.ape", "compressor.norm.weight"}
    expected = set() if name == "window" else set(compressor)
    if name.startswith("CSA"):
        expected |= {f"indexer.{x}" for x in (*compressor, "linear_wq_b.weight")}
    assert set(one[name]["averaged"]) == {f"core_attention.{x}" for x in expected}
