"""The small training scripts without training: help, installation, progress, resume."""

import os
import pty
import re
import shutil
import subprocess
import sys

import pytest

from tests.cases.launch_scripts import EXAMPLES

ROOT = EXAMPLES.parent
SCRIPTS = ("train_small.sh", "train_small_v4.sh", "dense_to_sparse.sh")


def line(step, last, more=""):
    return (
        f" [2026-01-01 00:00:00.1] iteration {step:8d}/ {last:7d} | consumed samples: 8 |"
        f" elapsed time per iteration (ms): 612.5 | lm loss: 2.214000E+00 |{more}"
        " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


LOG = (
    "> megatron_dsa runs (no GPU: torch runs everything):\n",
    ">   rotate  torch\n",
    line(101, 250),
    line(160, 250, " indexer loss: 1.3E-01 |"),
    "WARNING:megatron_dsa.ops.dispatch:indexer_topk: torch (cudnn: too old)\n",
    line(240, 250).replace("nan iterations:   0", "nan iterations:   3"),
    line(250, 250),
    "  [2026-01-01 00:00:00.1] successfully saved checkpoint from iteration     250 to x [ t ]\n",
    " validation loss at iteration 250 on validation set | lm loss value: 1.812345E+00 |\n",
    "ERROR: \xff lost\n",
)
PROGRESS = [sys.executable, EXAMPLES / "progress.py", "stage 2/3"]


def test_progress_in_a_file_is_printed_now_and_then():
    done = subprocess.run(
        PROGRESS, input="".join(LOG).encode("latin1"), capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines() == [
        "stage 2/3, step 101/250, loss 2.21, 0.61 s a step",  # includes compilation
        # The next ones follow within 10 seconds.
        "WARNING:megatron_dsa.ops.dispatch:indexer_topk: torch (cudnn: too old)",
        "stage 2/3, step 250/250, loss 2.21, 0.61 s a step",
        "saved step 250",
        "validation loss 1.812",
        "ERROR: \N{REPLACEMENT CHARACTER} lost",
    ]


def on_terminal(**variables):
    """Return a terminal's content without escapes."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    process = subprocess.Popen(
        PROGRESS, stdin=subprocess.PIPE, stdout=theirs,
        env=environment | {"TERM": "xterm", "COLUMNS": "100"} | variables,
    )  # fmt: skip
    os.close(theirs)
    process.communicate("".join(LOG).encode("latin1"))
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    return shown.decode()


def test_progress_on_a_terminal_is_rewritten_in_place():
    shown = on_terminal()
    assert "\x1b[36mstage 2/3\x1b[m, starting" in shown and "\x1b[33mWARNING" in shown
    plain = re.sub(r"\x1b\[\d*[mK]", "", shown)
    kept = [text.split("\r")[-1] for text in plain.split("\r\n")[:-1]]
    assert kept == [
        "WARNING:megatron_dsa.ops.dispatch:indexer_topk: torch (cudnn: too old)",
        "stage 2/3, step 250/250, loss 2.21, 0.61 s a step",
        "saved step 250",
        "validation loss 1.812",
        "ERROR: \N{REPLACEMENT CHARACTER} lost",
    ]
    assert "step 160/250, loss 2.21, indexer loss 0.13, 0.61 s a step, 55 s left" in plain
    assert "step 240/250, loss 2.21, 0.61 s a step, 6 s left, 3 nan iterations" in plain
    assert "\x1b[3" not in on_terminal(NO_COLOR="1")


@pytest.fixture
def clone(tmp_path):
    """Clone the scripts, without an environment."""
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "docs").mkdir()
    for file in ("setup.py", "docs/requirements.txt"):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_installation(script, clone):
    done = subprocess.run(
        ["bash", f"./{script}", "--help"], cwd=clone / "examples",
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert all(any(text.startswith(f"  {name} ") for text in lines) for name in ("STEPS", "PYTHON"))
    assert "set -euo" not in done.stdout and not done.stderr
    assert {path.name for path in clone.iterdir()} == {"docs", "examples", "scripts", "setup.py"}


@pytest.mark.parametrize("fails", [False, True])
def test_an_installation_in_a_few_lines(fails, clone):
    uv = clone / "bin/uv"
    uv.parent.mkdir()
    site = ".venv/lib/python3.12/site-packages"
    lines = "".join(f"echo ' + package-{number}';" for number in range(400))
    install = "echo 'error: no wheel'; exit 3" if fails else f"mkdir -p {site}/one-1.0.dist-info"
    make = "mkdir -p .venv/bin; ln -sf /bin/true .venv/bin/python"
    uv.write_text(f'#!/bin/sh\nif [ "$1" = venv ]; then {make}; else {lines} {install}; fi\n')
    uv.chmod(0o755)
    variables = {"PATH": f"{uv.parent}:/usr/bin:/bin", "PYTHON": sys.executable, "HOME": "/"}
    call = ["bash", clone / "scripts/environment.sh"]
    done = subprocess.run(call, env=variables, capture_output=True, text=True, check=False)
    log = clone / ".venv/install.log"
    assert log.exists(), done.stderr
    assert log.read_text().count("package-") >= 400
    said = done.stderr.splitlines()
    assert said[0].startswith("> installing into .venv")
    if fails:
        assert done.returncode == 3 and not done.stdout
        assert ".venv/install.log" in said[1] and said[-1] == "error: no wheel" and len(said) == 22
        return
    assert re.fullmatch(r"> installed 1 packages in \d+ s", said[1]) and len(said) == 2
    assert done.stdout == f"{clone}/.venv/bin/python\n"
    again = subprocess.run(call, env=variables, capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout and not again.stderr


def run(folder, training, *arguments, steps="20 10 20"):
    """Run train_small.sh with a shell script instead of training."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n*pretrain*)\n{training}\n;;\n'
        f'examples/progress.py*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    return subprocess.run(
        [EXAMPLES / "train_small.sh", *arguments],
        env=os.environ | {"PYTHON": str(python), "RUN_DIR": str(folder / "run"), "STEPS": steps},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_stage_that_fails_ends_the_script(tmp_path):
    done = run(tmp_path, "echo the reason; exit 5")
    assert done.returncode == 5 and done.stdout.endswith("== stage 1/3, dense, up to step 20\n")
    assert "the reason" in done.stderr and "stage dense failed" in done.stderr


#: Saves step ``--train-iters``, in the second call only the previous one.
SAVE = """
mkdir -p {run}/checkpoints; echo >> {run}/calls
for word in "$@"; do if [ "$before" = --train-iters ]; then step=$word; fi; before=$word; done
if [ $(wc -l < {run}/calls) = 2 ]; then step=$((step - 1)); fi
echo $step > {run}/checkpoints/latest_checkpointed_iteration.txt"""


def test_a_second_call_goes_on_where_the_first_has_stopped(tmp_path):
    training = SAVE.format(run=tmp_path / "run")
    done = run(tmp_path, training)
    assert done.returncode == 3 and "stage 2/3" in done.stdout and "stage 3/3" not in done.stdout
    assert done.stderr == "stopped; step 29 is saved, the same command continues from there\n"
    done = run(tmp_path, training)
    assert done.returncode == 0, done.stderr
    assert "stage 1/3, dense: trained up to step 20" in done.stdout
    assert "stage 2/3, warmup, up to step 30" in done.stdout
    assert len((tmp_path / "run/calls").read_text().splitlines()) == 4
    for ending in ("report.html", "checkpoints/iter_0000050", "train.log"):
        assert f" {tmp_path}/run/{ending}\n" in done.stdout
    assert len(done.stdout.partition("next, in ")[2].splitlines()) == 4  # a head, three commands
    for changed in (run(tmp_path, training, steps="1 1 1"), run(tmp_path, training, "--lr", "1")):
        assert changed.returncode == 2 and "begun with other settings" in changed.stderr
