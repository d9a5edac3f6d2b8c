"""``examples/train_small_v4.sh``: a small whole DeepSeek-V4 on real text."""

import os
import re
import subprocess

from tests.cases.launch_scripts import EXAMPLES
from tests.functional.launch import parse_steps
from tests.processes import python_path

#: Half of a step's sequences.
LESS = ("--global-batch-size", "4")


def test_a_small_whole_v4_trains(tmp_path, python):
    variables = {"PYTHON": python, "RUN_DIR": str(tmp_path), "STEPS": "8 2"}
    done = subprocess.run(
        [EXAMPLES / "train_small_v4.sh", "--log-interval", "1", "--eval-iters", "1", *LESS],
        env=os.environ | {"PYTHONPATH": python_path(), "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "train.log").read_text()
    steps = parse_steps(log)
    assert [step["iteration"] for step in steps] == [*range(1, 11)]
    first, last = steps[0], steps[-1]
    assert all(5.5 < first[name] < 6.5 for name in ("lm loss", "mtp_1 loss"))
    assert all(0 < last[name] < 5 for name in ("lm loss", "mtp_1 loss"))
    # The first stage has no indexers.
    assert ["indexer loss" in step for step in steps] == [False] * 8 + [True] * 2
    ran = dict(re.findall(r"^>   (\w+): torch (\d+)$", log, re.M))
    connections = {"hyper_connection_read", "hyper_connection_write", "hyper_connection_head"}
    assert connections | {"compressor", "indexer_topk", "sparse_indexer_loss"} <= set(ran)
    for part in ("hyper-connections", "experts", "multi-token prediction", "router"):
        assert re.search(rf"megatron_dsa counts .*{part} [\d.]+ %", log), part
    assert "seq_load_balancing_loss" in log
    for stage, end in ((1, "8/8"), (2, "10/10")):
        shown = rf"stage {stage}/2, step {end}, loss [\d.]+, MTP loss [\d.]+.*, [\d.]+ s a step"
        assert re.search(f"^{shown}$", done.stdout, re.M), done.stdout
    assert "WARNING" not in log and "memory (MB)" not in log
    assert (tmp_path / "report.html").exists()
    starts = ("The ", "An expression", "class ")
    written = done.stdout.partition("== three lines\n")[2].splitlines()[:3]
    assert all(line.startswith(start) for line, start in zip(written, starts, strict=True))
