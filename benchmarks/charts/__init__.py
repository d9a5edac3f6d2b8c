"""All charts, drawn from the CSVs and written next to them: ``python -m benchmarks charts``.

* ``attention_<preset>_tflops.png``: speed of forward and backward against the number of keys.
* ``masked_tflops.png``: that of masked dense attention, beside cuDNN's without a mask.
* ``csa_pieces.png``, ``connections_<preset>.png``: the share of the copy bandwidth.
* ``layer_time.png``, ``layer_shares.png``: V3.2's step against the length, and where ours spends
  it; ``layer_<preset>_shares.png`` the latter of V4; ``layer_core_memory.png``: the workspace.
* ``engine_tokens_per_s.png``: layers with transformer-engine, in bf16 and FP8.
* ``ranks_<n>gpus_layers.png``: efficiency and exposed communication. ``ranks_timelines.png``: when
  NCCL and other kernels run.
* ``train_convergence.png``: losses of sparse and dense attention; ``train_selected.png``: of sparse
  and masked dense attention; ``train_whole_v4.png``: of fused kernels and torch;
  ``train_muon.png``: of AdamW and Muon.

Where a file holds several runs of a measurement, the last one counts; a chart shows one GPU, the
last that was measured.
"""

from pathlib import Path

from benchmarks.charts.convergence import draw_train
from benchmarks.charts.drawing import points_of
from benchmarks.charts.engine import draw_engine
from benchmarks.charts.layers import draw_layers
from benchmarks.charts.operations import draw_attention, draw_connections, draw_csa, draw_masked
from benchmarks.charts.ranks import draw_ranks

DRAWN = {
    "attention": draw_attention,
    "csa": draw_csa,
    "connections": draw_connections,
    "masked": draw_masked,
    "layer": draw_layers,
    "engine": draw_engine,
    "ranks": draw_ranks,
    "train": draw_train,
}


def draw_all(folder: Path) -> list[Path]:
    """Draw what the CSVs in a folder allow; return the files that were written."""
    written: list[Path] = []
    for family, draw in DRAWN.items():
        path = folder / f"{family}.csv"
        if path.exists() and (points := points_of(path)):
            written += draw(points, folder)
    return written
