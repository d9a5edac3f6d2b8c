"""DSA and hybrid attention on tensor- and context-parallel ranks equal one rank: every gradient."""

import pytest

from tests.cases.layers import LAYERS, ROWS, case
from tests.ranks import compare, run
from tests.tiers import cases_run

VARIANTS = (
    "DSA in blocks", "CSA old teacher", "CSA warm-up", "HCA of long groups",
    "dense MLA, keys in a ring",
)  # fmt: skip
#: Ranks, and their division of tokens and heads.
GRIDS = {
    (1, 2): ("zigzag", "contiguous", "zigzag_rows"),
    (1, 4): ("zigzag", "contiguous"),
    (2, 1): ("heads", "sequence", "select"),
    (4, 1): ("select",),
    (2, 2): (
        "zigzag heads", "contiguous heads", "zigzag sequence", "contiguous sequence",
        "zigzag select", "contiguous select",
    ),
}  # fmt: skip


def names():
    return [(layer, rows) for layer in LAYERS for rows in ROWS]


def exists(layer, rows, mode, ranks):
    """Return whether a combination is run: variants independent of ranks run on two ranks only."""
    words = set(mode.split())
    if "pooled" in layer:
        if words & {"zigzag", "contiguous", "zigzag_rows"}:
            return False
        layer = layer.replace("pooled ", "")
    if "visible" in layer:
        return words == {"heads"} and rows != "two"
    if layer.endswith("by heads") and rows == "packed":
        return False  # its chunks are unequal
    if mode == "contiguous heads":
        return layer in ("DSA", "CSA") and rows == "one"
    if "select" in words:
        by_heads = layer.endswith("by heads") and words == {"select"} and ranks == 4
        return layer.startswith("DSA masked") and "dense loss" not in layer and not by_heads
    if layer.startswith("DSA masked") and ("sequence" in words or words == {"heads"}):
        return "sequence" not in words
    other = bool({"contiguous", "zigzag_rows"} & words)
    if layer.startswith("dense MLA") and other:
        return ranks == 2
    if layer.endswith(("fp32", "recomputed")):
        return rows != "two" and ranks == 4
    variant = rows == "two" or layer in VARIANTS
    return not variant or (ranks == 2 and not other)


@pytest.fixture(scope="module")
def grid(request, tmp_path_factory, backend):
    """Return results of a grid of ranks, by ``(layer, batch, mode)``."""
    done = {}

    def get(tp, cp):
        if (tp, cp) not in done:
            cases = {
                (layer, rows, mode): case(layer, rows, mode)
                for layer, rows, mode, *ranks in cases_run(
                    request, "layer", "rows", "mode", "tp", "cp"
                )
                if ranks == [tp, cp]
            }
            done[tp, cp] = run(cases, tp, tmp_path_factory.mktemp("ranks"), cp, backend)
        return done[tp, cp]

    return get


@pytest.fixture(scope="module")
def single(request, tmp_path_factory, backend):
    cases = {n: case(*n) for n in cases_run(request, "layer", "rows")}
    return run(cases, 1, tmp_path_factory.mktemp("one"), backend=backend)[0]


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
    ran = several[0]["report"]
    if tp > 1:
        divided = "heads" if layer.startswith("dense") else mode.split()[-1]
        assert list(ran["tensor_parallel_attention"]) == [divided]
    if "visible" in layer:
        assert ran["masked_attention_forward"] and "dense_attention" not in ran
    if layer.endswith("blocks"):
        assert ran["sparse_attention_backward"]["torch"] > 3
    calls = layer.startswith(("DSA", "CSA")) and "warm-up" not in layer
    selections = calls * (2 if layer.endswith("recomputed") else 1)
    assert len(several[0]["slots"]) == len(single[layer, rows]["slots"]) == selections
    # Tokens with unequal work are scored by both ranks.
    uneven = "contiguous" in mode or mode.endswith(("sequence", "select"))
    exchanged = {"exchanged": selections} if selections and uneven and rows != "packed" else None
    assert all(rank["report"].get("indexer_balance") == exchanged for rank in several)
    assert "indexer_balance" not in single[layer, rows]["report"]
