"""DSA and hybrid attention on tensor- and context-parallel ranks equal one rank: every gradient."""

import dataclasses

import pytest
import torch

from megatron_dsa.config import DSAOptions
from tests.ranks import Case, compare, run

DSA = Case(
    config="small_config",
    selector="modules.dsa_core",
    by_sequence=(
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
    ),
    by_columns=("linear_proj",),
    rows=96,
)
HYBRID = Case(
    config="small_csa_config",
    selector="modules.csa_core",
    by_sequence=("linear_q_up_proj", "attn_sink", "linear_o_group_proj"),
    by_columns=("linear_proj",),
    rows=96,
)
#: Sequences shorter than the window, than a group, empty, and with padding behind.
PACKED = {"lengths": (30, 3, 0, 40, 10), "padded": (32, 8, 0, 40, 16)}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj"],
}
LAYERS = {
    "DSA": (DSA, (), {}),
    "DSA dense loss": (DSA, (), {"dsa_indexer_use_sparse_loss": False}),
    "dense MLA": (DSA, (), {"stage": "dense"}),
    "dense MLA, warm-up": (DSA, (), {"stage": "warmup", "dsa_indexer_use_sparse_loss": False}),
    "dense MLA, keys in a ring": (
        DSA,
        (),
        {"stage": "warmup", "cp_exchange": "keys", "dsa_indexer_use_sparse_loss": False},
    ),
    "window": (HYBRID, (0,), {}),
    "CSA": (HYBRID, (4,), {}),
    "CSA dense loss": (HYBRID, (4,), {"dsa_indexer_use_sparse_loss": False}),
    "CSA old teacher": (HYBRID, (4,), {"csa_teacher": "compressed"}),
    "CSA warm-up": (HYBRID, (4,), {"stage": "warmup", "dsa_indexer_use_sparse_loss": False}),
    "HCA": (HYBRID, (6,), {}),
    "HCA of long groups": (HYBRID, (20,), {}),
    "DSA recomputed": (DSA, (), RECOMPUTED),
    "CSA recomputed": (HYBRID, (4,), RECOMPUTED),
    "DSA fp32": (DSA, (), {"dtype": torch.float32}),
    "CSA fp32": (HYBRID, (4,), {"dtype": torch.float32}),
    "HCA fp32": (HYBRID, (6,), {"dtype": torch.float32}),
}
VARIANTS = ("CSA old teacher", "CSA warm-up", "HCA of long groups", "dense MLA, keys in a ring")
ROWS = {
    "one": {},
    "two": {"batch": 2},
    "packed": PACKED,
}
#: Ranks, and how they divide rows and heads.
GRIDS = {
    (1, 2): ("zigzag", "contiguous", "zigzag_rows"),
    (1, 4): ("zigzag", "contiguous"),
    (2, 1): ("heads", "sequence"),
    (2, 2): ("zigzag heads", "zigzag sequence", "contiguous sequence"),
}


def case(layer, rows, mode=""):
    base, arguments, changes = LAYERS[layer]
    options = {
        key: changes[key] for key in ("csa_teacher", "stage", "cp_exchange") if key in changes
    }
    changes = {key: value for key, value in changes.items() if key not in options}
    words = mode.split()
    cp_layout = next((w for w in words if w in ("zigzag", "contiguous", "zigzag_rows")), "zigzag")
    tp_mode = next((w for w in words if w in ("heads", "sequence")), "auto")
    options = DSAOptions(cp_layout=cp_layout, tp_mode=tp_mode, **options)
    return dataclasses.replace(
        base, arguments=arguments, changes=changes | {"options": options}, cp_layout=cp_layout,
        **ROWS[rows],
    )  # fmt: skip


def names():
    return [(layer, rows) for layer in LAYERS for rows in ROWS]


def exists(layer, rows, mode, ranks):
    """Whether it is worth a run: variants that say little about ranks run on two ranks only."""
    other = bool({"contiguous", "zigzag_rows"} & set(mode.split()))
    if layer.startswith("dense MLA") and other:
        return ranks == 2
    if layer.endswith(("fp32", "recomputed")):
        return rows != "two" and ranks == 4
    variant = rows == "two" or layer in VARIANTS
    return not variant or (ranks == 2 and not other)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Results of a grid of ranks, by ``(layer, rows, mode)``."""
    done = {}

    def get(tp, cp):
        if (tp, cp) not in done:
            with pytest.MonkeyPatch.context() as patch:
                # On the CPU also where there is a GPU: NCCL wants one GPU per rank.
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
                cases = {
                    (layer, rows, mode): case(layer, rows, mode)
                    for layer, rows in names()
                    for mode in GRIDS[tp, cp]
                    if exists(layer, rows, mode, tp * cp)
                }
                done[tp, cp] = run(cases, tp, tmp_path_factory.mktemp("ranks"), cp)
        return done[tp, cp]

    return get


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What one rank computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cases = {n: case(*n) for n in names()}
        return run(cases, 1, tmp_path_factory.mktemp("one"))[0]


PARAMETERS = [
    pytest.param(tp, cp, mode, layer, rows, id=f"tp{tp}-cp{cp}-{mode}-{layer}-{rows}")
    for (tp, cp), modes in GRIDS.items()
    for mode in modes
    for layer, rows in names()
    if exists(layer, rows, mode, tp * cp)
]


@pytest.mark.parametrize(("tp", "cp", "mode", "layer", "rows"), PARAMETERS)
def test_ranks_equal_one(tp, cp, mode, layer, rows, single, grid):
    several = [rank[layer, rows, mode] for rank in grid(tp, cp)]
    tolerance = 1e-5 if layer.endswith("fp32") else 1e-12
    compare(case(layer, rows, mode), single[layer, rows], several, tolerance, tp=tp, cp=cp)
    selects = layer.startswith(("DSA", "CSA")) and "warm-up" not in layer
    assert len(several[0]["slots"]) == selects * (2 if layer.endswith("recomputed") else 1)
