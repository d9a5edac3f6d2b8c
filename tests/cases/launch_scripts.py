"""The launch scripts of ``examples/``: variables and launched commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: Required variables, with made-up values.
TRAINING = {
    "DATA_PATH": "data",
    "TOKENIZER": "tokenizer",
    "CHECKPOINTS": "checkpoints",
    "TRAIN_STEPS": "10",
    "GLOBAL_BATCH": "8",
    "LR": "1e-4",
}


def launch(script, folder, variables, *arguments, before=()):
    """Run a script with a Python that only prints its arguments and ``WORLD_SIZE``."""
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ.get('WORLD_SIZE')]))\n"
    )
    if "CHECKPOINTS" in variables:
        variables = variables | {"CHECKPOINTS": str(folder / "checkpoints")}
    python.chmod(0o755)
    return subprocess.run(
        [*before, EXAMPLES / script, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def launched(script, folder, *call, **more):
    """Return the launched command, the training flags, and ``WORLD_SIZE``."""
    done = launch(script, folder, *call, **more)
    assert done.returncode == 0, done.stderr
    (said,) = [done.stdout] if done.stdout else [log.read_text() for log in logs(folder)]
    launcher, world = json.loads(said)
    module = launcher.index("megatron_dsa.pretrain")
    return launcher[:module], launcher[module + 1 :], world


def logs(folder):
    return sorted((folder / "checkpoints").glob("train*.log"))
