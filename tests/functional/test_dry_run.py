"""A dry run of launch scripts, started like a user's."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from megatron_dsa.versions import installed_version
from tests.cases.launch_scripts import launch
from tests.functional.launch import ENTRY_POINT, REPOSITORY
from tests.processes import python_path

#: Runs a command and prints its peak memory (KiB), in its own process because Linux inherits the
#: parent's peak.
WITH_MEMORY = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
sys.exit(status)
"""


def dry_run(flags, folder):
    """Start the entry point like a user; return its output and peak memory in KiB."""
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", WITH_MEMORY, sys.executable, "-m", ENTRY_POINT, *flags],
        env=environment, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, most = done.stdout.splitlines()
    # Tokenizer, data and checkpoints need not exist.
    assert os.listdir(folder) == ["python"]
    return lines, int(most)


def planned(script, folder, variables=None):
    """Plan a launch script without data; return output and peak memory in KiB."""
    done = launch(script, folder, variables or {}, "--dsa-dry-run")
    assert done.returncode == 0, done.stderr
    flags, world = json.loads(done.stdout)
    flags = flags[flags.index("megatron_dsa.pretrain") + 1 :]
    return dry_run([*flags, "--dsa-dry-run-world", world, "--dsa-dry-run-gpu", "h200"], folder)


def test_a_launch_script_of_a_whole_v4(tmp_path):
    lines, most = planned("v4_flash.sh", tmp_path)
    assert lines[0].startswith("fits, ") and lines[1].startswith(
        "plan for 128 x NVIDIA H200: TP 8 (attention by sequence), PP 4, EP 32"
    )
    stages = [line for line in lines if line.startswith(("  0: ", "  1: ", "  2: ", "  3: "))]
    assert len(stages) == 4 and "embedding" in stages[0] and "MTP layer 1: window" in stages[3]
    looked_up = "256 experts, looked up by token"
    assert (
        f"layers 1-2: window; {looked_up} | layer 3: CSA (ratio 4) with indexer; {looked_up}"
        in (stages[0])
    )
    assert "HCA (ratio 128); 256 experts | " in stages[0] and looked_up not in stages[1]
    assert any("hyper-connections" in line and "GFLOP per token" in line for line in lines)
    assert "  hyper_connection_head: triton (fused) in layer 43; MTP layer 1" in lines
    assert most < 2 * 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page is for the packages of a CPU")
def test_memory_of_long_sequences_is_that_of_the_page(tmp_path):
    page = (REPOSITORY / "docs/guide/planning.md").read_text()
    row = r"^\| 131072 \| 4 \| `RECOMPUTE=full` \| (\d+) to (\d+) \| (\S+) \| (\S+) \|$"
    least, most, *sizes = re.search(row, page, re.M).groups()
    variables = {"SEQ_LENGTH": "131072", "CP": "4", "RECOMPUTE": "full", "GLOBAL_BATCH": "32"}
    lines, _ = planned("v4_flash.sh", tmp_path, variables)
    (first,) = (line.split() for line in lines if re.match(r" +0 +\d", line))
    assert [first[4], first[6]] == sizes
    begin = lines.index("kept for the backward pass, MiB per layer and microbatch") + 1
    end = lines.index("what runs (dsa_fused)")
    kept = [float(line.split(": ")[1].split(" to ")[0]) for line in lines[begin:end]]
    assert [round(min(kept)), round(max(kept))] == [int(least), int(most)]


@pytest.mark.skipif(
    torch.cuda.is_available() or installed_version("transformer-engine") is not None,
    reason="the page is for a machine without a GPU and without transformer-engine's optimizer",
)
def test_the_plan_that_the_documentation_shows(tmp_path):
    lines, _ = planned("v3_2.sh", tmp_path)
    page = (REPOSITORY / "docs/guide/planning.md").read_text()
    shown = re.search(r"```text\n(fits, .*?)```", page, re.DOTALL)[1].splitlines()
    # Implementations depend on installed packages.
    first, last = shown.index("what runs (dsa_fused)"), len(shown) - 4
    figures = [*shown[:2], *shown[3:first], *shown[last:]]
    assert len(figures) > 15 and "GFLOP per token" in shown[last]
    for line in figures:
        if line.strip() != "...":
            begin = line.removesuffix(" ...")
            assert any(x == line or (x.startswith(begin) and x != begin) for x in lines), line
