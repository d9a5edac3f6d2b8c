"""One tiny run of every family from the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rows import METRICS, read_csv
from benchmarks.schema import STATUSES
from benchmarks.settings import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
#: Family -> its command line, and required pairs of part and way.
RUNS = {
    "attention": (
        ["--distributions", "clustered:0.5"],
        {("gemm", "torch"), ("copy", "torch"), ("forward", "torch"), ("teacher", "torch"),
         ("backward", "torch")},
    ),
    "masked": (
        ["--distributions", "clustered:0.5"],
        {("gemm", "torch"), ("forward", "torch"), ("teacher", "torch"), ("backward", "torch")},
    ),
    "indexer": (
        [],
        {("select", "torch"), ("loss:sorted", "torch"), ("loss:clustered", "torch"),
         ("dense", "torch"), ("dense", "megatron"), ("gemm", "torch")},
    ),
    "csa": (
        ["--ways", "torch", "eager"],
        {("copy", "torch"), ("compressor_forward, ratio 4, dim 32", "eager"),
         ("norm_rope_backward, heads 2, dim 32", "torch"), ("key_lists, ratio 0", "torch")},
    ),
    "connections": (
        ["--ways", "torch", "plain", "streams"],
        {("copy", "torch"), ("read_forward", "torch"), ("write_backward", "torch"),
         ("head_backward", "torch"), ("step", "plain"), ("step", "streams")},
    ),
    "layer": (
        ["--tokens", "128", "--ratios", "4"],
        {("forward", "ours"), ("step", "ours"), ("step", "sparse"), ("step", "masked"),
         ("step", "dense"), ("step", "ours-dense"), ("step", "bundled"), ("step", "torch"),
         ("step", "sparse-rank"), ("step", "masked-rank"), ("step", "dense-rank"),
         ("step/collectives", "masked-rank"),
         ("step/sparse_attention_backward", "ours")},
    ),
    "engine": (
        ["--repeats", "3"],
        {("step", "local")},
    ),
    "recall": (
        [],
        {("layer 2", "bf16"), ("all", "bf16"), ("layer 2", "e4m3"), ("all", "e4m3")},
    ),
    "ranks": (
        ["--grids", "tp1cp2"],
        {("step", "one rank"), ("forward", "zigzag"), ("step", "contiguous"), ("step", "plain"),
         ("step", "one rank masked"), ("step", "masked"),
         ("step", "gathered latents")},
    ),
    "train": (
        ["--kinds", "memory", "selected", "--steps", "10"],
        {("step", "ours"), ("10", "sparse"), ("10", "masked"), ("10", "sparse again")},
    ),
}  # fmt: skip


def run(python, family, output, *arguments):
    command = [python, "-m", "benchmarks", family, "--quick", "--repeats", "2"]
    done = subprocess.run(
        [*command, "--output", str(output), *arguments], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"they are in {output}" in done.stdout
    return read_csv(output)


def test_every_family_is_run():
    assert set(RUNS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_quick(family, python, tmp_path):
    arguments, expected = RUNS[family]
    if family == "attention":  # one like users
        python = sys.executable
    rows = run(python, family, tmp_path / "rows.csv", *arguments)
    assert expected <= {(row["part"], row["way"]) for row in rows if row["status"] == "ok"}
    assert {row["family"] for row in rows} == {family} and len({r["date"] for r in rows}) == 1
    for row in rows:
        assert row["status"] in STATUSES and row["metric"] in METRICS
        assert row["gpu"].startswith("CPU") and row["versions"]["torch"]
        if row["status"] != "ok":
            assert row["value"] is None and row["reason"]
        elif row["metric"] == "ms" and "/" not in row["part"]:
            assert 0 < row["p10"] <= row["value"] <= row["p90"]
            assert row["repeats"] <= 5 or row["part"] == "all"  # steps of a run
        elif row["metric"] == "rel_error":
            assert row["value"] < 4e-3
    check = {"ranks": check_ranks, "train": check_train, "layer": check_layer,
             "recall": check_recall}.get(family)  # fmt: skip
    if check:
        check(rows)


def values(rows, part, metric):
    return {row["way"]: row["value"] for row in rows
            if (row["part"], row["metric"]) == (part, metric)}  # fmt: skip


def check_layer(rows):
    shares = [row for row in rows if row["metric"] == "share_of_time" and row["way"] == "ours"]
    cases = {str(row["case"]) for row in shares}
    total = sum(row["value"] for row in shares)
    assert len(cases) == 2 and total == pytest.approx(2, rel=1e-3)
    compared = {"all-queries", "frozen", "sparse", "recomputed", "masked", "dense", "ours-dense"}
    assert set(values(rows, "step", "out_error")) == compared | {"bundled", "torch"}
    assert set(values(rows, "step", "sent_bytes")) == {"sparse-rank", "masked-rank", "dense-rank"}
    ran = {row["way"]: row["ran"] for row in rows if row["part"] == "step"}
    assert "; masked_attention_forward=" in ran["masked"] and "sparse_att" not in ran["masked"]
    assert "; sparse_attention_forward=" in ran["sparse"] and "masked_att" not in ran["sparse"]


def check_recall(rows):
    """Rounding changes some keys, but hardly the captured mass."""
    found, least = (values(rows, "all", name) for name in ("recall", "least_recall"))
    assert found["bf16"] == least["bf16"] == 1 and 0.7 < found["e4m3"] < 1
    assert least["e4m3"] <= found["e4m3"]
    errors = values(rows, "all", "score_error")
    assert errors["bf16"] == 0 and 1e-3 < errors["e4m3"] < 0.2
    mass = values(rows, "all", "mass_captured")
    assert mass["e4m3"] == pytest.approx(mass["bf16"], abs=0.05) and 0 < mass["bf16"] < 1


def check_ranks(rows):
    """Check that counted bytes equal the design, and efficiency the same run's times.

    A token's latent (16 + 8) and index key (16): bf16 to the other rank, fp32 back. With contiguous
    parts the other rank scores every second token: index query and weights (3 heads) in bf16 there,
    12 selected keys back.
    """
    layers = [row for row in rows if row["case"]["kind"] == "layers"]
    found = values(layers, "step", "bytes_per_token")
    assert found == values(layers, "step", "formula_bytes_per_token")
    keys = (16 + 8 + 16) * (2 + 4)
    balanced = (3 * (16 + 1) * 2 + 12 * 4) / 2
    assert found == {
        "zigzag": keys,
        "contiguous": keys + balanced,
        "plain": keys,
        "masked": keys,
        "recomputed": keys,
    }
    assert set(values(layers, "step", "hidden_bytes_per_token").values()) == {32 * (2 + 2)}
    assert all(error < 1e-3 for error in values(layers, "step", "out_error").values())
    times, efficiency = values(layers, "step", "ms"), values(layers, "step", "efficiency")
    assert set(efficiency) == set(times) - {"one rank", "one rank masked", "one rank recomputed"}
    for way, share in efficiency.items():
        alone = times[f"one rank {way}" if way in ("masked", "recomputed") else "one rank"]
        assert share == pytest.approx(alone / 2 / times[way], rel=1e-3)
    dense = [row for row in rows if row["case"]["kind"] == "dense"]
    assert values(dense, "step", "out_error")["gathered latents"] < 1e-2


def check_train(rows):
    (planned,), (peak,) = (values(rows, "step", name).values() for name in
                           ("planned_mib", "peak_mib"))  # fmt: skip
    assert planned == pytest.approx(peak, rel=0.1)
    # Both attentions agree; on the CPU, two runs are equal.
    for step in range(1, 11):
        losses = values(rows, str(step), "lm_loss")
        assert losses["masked"] == pytest.approx(losses["sparse"], rel=1e-5)
        assert losses["sparse again"] == losses["sparse"]
    first, last = (values(rows, step, "lm_loss")["sparse"] for step in ("1", "10"))
    assert last < first - 0.05
    ran = {row["way"]: row["ran"] for row in rows if row["part"] == "all"}
    assert "masked_attention_backward=" in ran["masked"] and "sparse_att" not in ran["masked"]
