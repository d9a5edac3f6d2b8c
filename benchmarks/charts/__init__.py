"""All charts, drawn from the CSVs and written next to them: ``python -m benchmarks charts``.

* ``attention_<preset>_tflops.png``: speed of forward and backward by number of keys.
* ``masked_tflops.png``: masked dense attention, compared with cuDNN without a mask.
* ``csa_pieces.png``, ``connections_<preset>.png``: share of the copy bandwidth.
* ``layer_time.png``, ``layer_shares.png``: V3.2's step by length, and its parts;
  ``layer_<preset>_shares.png``: parts of V4's; ``layer_core_memory.png``: the workspace.
* ``engine_tokens_per_s.png``: layers with transformer-engine, in bf16 and FP8.
* ``ranks_<n>gpus_layers.png``: efficiency and exposed communication. ``ranks_timelines.png``: NCCL
  and other kernels over time.
* ``train_convergence.png``: losses of sparse and dense attention; ``train_selected.png``: sparse
  and masked dense attention; ``train_whole_v4.png``: fused kernels and torch; ``train_muon.png``:
  AdamW and Muon.

The last run of a measurement counts; a chart shows one GPU, the last measured.
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
    """Draw the charts of a folder's CSVs; return the files."""
    written: list[Path] = []
    for family, draw in DRAWN.items():
        path = folder / f"{family}.csv"
        if path.exists() and (points := points_of(path)):
            written += draw(points, folder)
    return written
