"""A dry run of a launch script's own flags, as a user starts it."""

import os
import subprocess
import sys

from tests.functional.launch import ENTRY_POINT, REPOSITORY
from tests.unit.test_examples import V4, launched

JOB = {
    "TP": "8", "PP": "4", "EP": "8", "NODES": "4", "MOE_LAYER_FREQ": "1", "NUM_EXPERTS": "16",
    "EXPERTS_PER_TOKEN": "2", "EXPERT_SIZE": "2048", "SHARED_EXPERT_SIZE": "2048",
    "PIPELINE_LAYOUT": "Et*11|t*11|t*11|t*10mL", "GLOBAL_BATCH": "64",
}  # fmt: skip
#: Runs a command, and prints the most memory (KiB) that it had. A process of its own: to a command
#: that this one starts, Linux counts the memory that this one has had.
WITH_MEMORY = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
sys.exit(status)
"""


def test_flags_of_a_launch_script(tmp_path):
    _, flags, _ = launched("v4_flash.sh", tmp_path, V4 | JOB)
    places = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": places}
    command = [sys.executable, "-m", ENTRY_POINT, *flags, "--vocab-size", "129280"]
    command += ["--dsa-dry-run", "--dsa-dry-run-world", "32", "--dsa-dry-run-gpu", "h200"]
    done = subprocess.run(
        [sys.executable, "-c", WITH_MEMORY, *command],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, most = done.stdout.splitlines()
    assert lines[0].startswith("plan for 32 x NVIDIA H200: TP 8 (attention by rows), PP 4, EP 8")
    stages = [line for line in lines if line.startswith(("  0: ", "  1: ", "  2: ", "  3: "))]
    assert len(stages) == 4 and "embedding" in stages[0] and "MTP layer 1: window" in stages[3]
    for kind in ("window", "CSA (ratio 4) with indexer", "HCA (ratio 128)"):
        assert kind in stages[0]
    assert int(most) < 2 * 2**20  # KiB
    # It reads and writes nothing: the tokenizer, data and checkpoints that are named do not exist.
    assert os.listdir(tmp_path) == ["python"]
