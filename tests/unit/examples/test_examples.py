"""Launch scripts: valid flags that describe the released models."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from megatron_dsa.config.presets import AROUND, LATENT_EPSILON, POOL_SIZE, PRESETS
from megatron_dsa.extras.huggingface.config_json import check_model, parse_config
from megatron_dsa.extras.huggingface.flags import flags_of
from tests.cases.launch_scripts import EXAMPLES, TRAINING, launch, launched, logs
from tests.cases.released_models import CONFIGS, GLM_5
from tests.host import parsed


def configured(flags, world, monkeypatch):
    """Return configuration and arguments of flags."""
    from megatron_dsa.pretrain import model_config_from_args

    # Grouped expert GEMMs require a GPU; the scripts target Hopper.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    args = parsed(flags, world, monkeypatch)
    if args.padded_vocab_size is None:
        args.padded_vocab_size = 1024  # the tokenizer's
    assert args.eval_interval  # Megatron divides by it, even without validation
    return model_config_from_args(args).transformer, args


#: Script -> preset, GPUs, default pipeline ranks.
SCRIPTS = {
    "v3_2.sh": ("v3.2", 256, 8),
    "glm_5.sh": ("glm-5", 256, 8),
    "glm_5_3_flash.sh": ("glm-5.3-flash", 128, 4),
    "v4_flash.sh": ("v4-flash", 128, 4),
    "v4_pro.sh": ("v4-pro", 512, 8),
}
WARM_UP, LONG = {"STAGE": "warmup"}, {"SEQ_LENGTH": "131072", "CP": "4"}
RUNS = [
    *((script, {}) for script in SCRIPTS),
    ("v3_2.sh", WARM_UP),
    ("v3_2.sh", WARM_UP | {"RECOMPUTE": "full"}),
    ("v3_2.sh", LONG),
    ("glm_5_3_flash.sh", WARM_UP),
    ("v4_flash.sh", {"STAGE": "dense"}),
    ("v4_flash.sh", WARM_UP),
    ("v4_pro.sh", LONG | {"RECOMPUTE": "full"}),
]
#: Flags left to the user: balancing of experts, weights of losses.
TRAINED = {
    "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "mtp_loss_scaling_factor", "kv_lora_rank", "dsa_indexer_use_sparse_loss",
}  # fmt: skip


@pytest.mark.parametrize(
    "script, variables", RUNS, ids=[" ".join([s, *map("=".join, v.items())]) for s, v in RUNS]
)
def test_script_of_released_model(script, variables, tmp_path, monkeypatch):
    """A script's flags must satisfy ``--dsa-load-hf`` for its ``config.json``."""
    preset, world, ranks = SCRIPTS[script]
    released = CONFIGS[preset]
    launcher, flags, _ = launched(script, tmp_path, TRAINING | variables)
    assert launcher[2:4] == ["--nnodes", str(world // 8)]
    config, args = configured(flags, world, monkeypatch)
    check_model(parse_config(released), config)
    fields = AROUND[preset] | PRESETS[preset]
    assert config.dsa.latent_norm_epsilon == fields.pop(LATENT_EPSILON, None)
    assert config.dsa.indexer_pool_size == fields.pop(POOL_SIZE, 1)
    assert all(getattr(config, field) == value for field, value in fields.items())
    text = released.get("text_config", released)
    assert args.padded_vocab_size == text["vocab_size"]
    assert args.mtp_num_layers == text["num_nextn_predict_layers"]
    assert args.seq_length == int(variables.get("SEQ_LENGTH", 4096))
    assert not args.dsa_model_changes
    assert args.context_parallel_size == int(variables.get("CP", 1))
    assert config.dsa.stage == variables.get("STAGE", "sparse")
    usual = None if config.dsa.stage == "warmup" else "selective"
    assert args.recompute_granularity == variables.get("RECOMPUTE", usual)
    stages = config.pipeline_model_parallel_layout.layout
    assert len(stages) == args.pipeline_model_parallel_size == ranks


@pytest.mark.parametrize("script", ["v4_flash.sh", "v4_pro.sh"])
def test_v4_scripts_have_the_flags_of_config_json(script, tmp_path, monkeypatch):
    preset, world, _ = SCRIPTS[script]
    _, flags, _ = launched(script, tmp_path, TRAINING)
    of_training = flags[flags.index("--tensor-model-parallel-size") :]
    printed = flags_of(parse_config(CONFIGS[preset]))
    ours, _ = configured(flags, world, monkeypatch)
    theirs, _ = configured([*printed, *of_training], world, monkeypatch)
    fields = {field.name for field in dataclasses.fields(ours)} - TRAINED
    own = [name for name in fields if name not in ("dsa", "pipeline_model_parallel_layout")]
    assert len(own) > 200 and {"hc_mult", "moe_hash_layers", "init_method_std"} <= set(own)
    different = {
        name for name in own
        if (a := getattr(ours, name)) != (b := getattr(theirs, name)) and not callable(a)
        and [a] * ours.num_layers != b  # --moe-layer-freq 1
    }  # fmt: skip
    assert not different and ours.dsa == theirs.dsa


@pytest.mark.parametrize("script", ["v4_flash.sh", "v4_pro.sh"])
def test_v4_scripts_take_the_flags_of_muon(script, tmp_path, monkeypatch):
    pytest.importorskip("emerging_optimizers", minversion="0.3")
    page = (EXAMPLES.parent / "docs/guide/muon.md").read_text()
    flags = re.search(r"```bash\n(--optimizer muon .*?)```", page, re.S)[1].split()
    _, flags, _ = launched(script, tmp_path, TRAINING, *flags)
    _, args = configured(flags, SCRIPTS[script][1], monkeypatch)
    assert args.optimizer == "muon" and args.muon_coefficient_type == "deepseekv4"


def test_index_sharing_of_later_glm(tmp_path, monkeypatch):
    sharing = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    released = GLM_5 | sharing | {"rope_parameters": {"rope_theta": 8000000}}
    flags = ("--dsa-indexer-topk-freq", "4", "--dsa-indexer-skip-topk-offset", "3")
    _, flags, _ = launched("glm_5.sh", tmp_path, TRAINING | {"ROTARY_BASE": "8000000"}, *flags)
    config, _ = configured(flags, 256, monkeypatch)
    check_model(parse_config(released), config)


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_needs_no_launcher(script, tmp_path):
    launcher, flags, world = launched(script, tmp_path, {"NODES": "4"}, "--dsa-dry-run")
    assert launcher == ["-m"] and flags[-1] == "--dsa-dry-run" and world == "32"


def test_slurm(tmp_path):
    for name, text in {
        "srun": 'shift\nSLURM_NODEID=3 exec "$@"',  # the flag, then a task's command
        "scontrol": "echo first\necho second",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = TRAINING | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "64",
        "SLURM_JOB_NODELIST": "node[1-64]",
        "SLURM_JOB_ID": "41234",
    }
    job = ["bash", EXAMPLES / "slurm.sbatch"]
    launcher, flags, _ = launched("v3_2.sh", tmp_path, variables, "--seed", "3", before=job)
    got = dict(zip(launcher[2:-1:2], launcher[3:-1:2], strict=True))
    assert got == {
        "--nnodes": "64",
        "--node-rank": "3",
        "--nproc-per-node": "8",
        "--master-addr": "first",
        "--master-port": "21234",
    }
    assert flags[-2:] == ["--seed", "3"] and "data" in flags
    assert [log.name for log in logs(tmp_path)] == ["train.node3.log"]


def unset_variables(script, folder, variables, *arguments):
    """Return the variables that a script requires first."""
    done = launch(script, folder, variables, *arguments)
    first, *lines = done.stderr.splitlines()
    assert first == f"{script}: set these variables, which have no default:"
    assert done.returncode == 2 and not done.stdout
    meanings = dict(line.strip().split(": ", 1) for line in lines)
    assert all(meanings.values())
    return list(meanings)


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_unset_variables_are_named_at_once(script, tmp_path):
    assert unset_variables(script, tmp_path, {}) == [*TRAINING]


def test_more_flags_of_several_lines(tmp_path):
    variables = {"MORE_FLAGS": "--seed 3\n--dsa-dry-run\n--name *"}
    launcher, flags, _ = launched("v3_2.sh", tmp_path, variables, "last")
    assert launcher == ["-m"]
    assert flags[-6:] == ["--seed", "3", "--dsa-dry-run", "--name", "*", "last"]


def test_a_run_is_watched(tmp_path, monkeypatch):
    for variables, expected in (
        ({}, {"data_path": ["data"], "split": "100,0,0", "eval_iters": 0, "wandb_project": None}),
        (
            {
                "DATA_PATH": "0.3 a\n0.7 b", "SPLIT": "99,1,0", "EVAL_STEPS": "8",
                "EVAL_INTERVAL": "50", "WANDB_PROJECT": "my project",
                "SAVE_RETAIN_INTERVAL": "1000",
            },
            {
                "data_path": ["0.3", "a", "0.7", "b"], "split": "99,1,0", "eval_iters": 8,
                "eval_interval": 50, "wandb_project": "my project", "wandb_exp_name": "checkpoints",
                "save_retain_interval": 1000,
            },
        ),
        (
            {
                "VALID_DATA_PATH": "0.5 c 0.5 d", "EVAL_STEPS": "2", "WANDB_PROJECT": "p",
                "WANDB_NAME": "a name",
            },
            {
                "train_data_path": ["data"], "valid_data_path": ["0.5", "c", "0.5", "d"],
                "data_path": None, "split": None, "wandb_exp_name": "a name",
            },
        ),
    ):  # fmt: skip
        _, flags, _ = launched("v3_2.sh", tmp_path, TRAINING | variables)
        _, args = configured(flags, SCRIPTS["v3_2.sh"][1], monkeypatch)
        assert {name: getattr(args, name) for name in expected} == expected
        assert args.tensorboard_dir == str(tmp_path / "checkpoints/events")
        (tmp_path / "checkpoints/train.node0.log").unlink()
    _, flags, _ = launched("v3_2.sh", tmp_path, TRAINING | {"TENSORBOARD_DIR": "elsewhere"})
    assert flags[flags.index("--tensorboard-dir") + 1] == "elsewhere"
    done = launch("v3_2.sh", tmp_path, TRAINING | {"VALID_DATA_PATH": "c", "SPLIT": "9,1,0"})
    assert done.returncode == 2 and "SPLIT must be unset with VALID_DATA_PATH" in done.stderr
    done = launch("v3_2.sh", tmp_path, TRAINING | {"VALID_DATA_PATH": "c"})
    assert done.returncode == 2 and "EVAL_STEPS must be set with VALID_DATA_PATH" in done.stderr


def test_unknown_recompute_is_refused(tmp_path):
    done = launch("v3_2.sh", tmp_path, TRAINING | {"RECOMPUTE": "most"})
    assert done.returncode == 2 and "got most" in done.stderr


TRAINING_OUTPUT = """\
a line of Megatron
 [2026-01-01 00:00:00] iteration        1/       5 | lm loss: 5.7E+00 |
WARNING:megatron_dsa.ops.dispatch:indexer_topk: torch (cudnn: too old)
> megatron_dsa runs:
>   operation     implementation  reason
>   indexer_topk  torch           cudnn: too old
 validation loss at iteration 5 | lm loss value: 4.0E+00 |
another line
"""


def logged(folder, *command):
    """Start ``log.sh``'s function that runs a command with the log ``folder/new/train.log``."""
    script = f'set -euo pipefail; source {EXAMPLES}/log.sh; logged new/train.log "$@"; echo after'
    return subprocess.Popen(
        ["bash", "-c", script, "script", *command],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_terminal_shows_training_lines_and_the_log_everything(tmp_path):
    for _ in range(2):  # a resumed run appends
        process = logged(tmp_path, "printf", "%s", TRAINING_OUTPUT)
        out, err = process.communicate()
        assert process.returncode == 0 and not err
        assert out.splitlines() == [*TRAINING_OUTPUT.splitlines()[1:-1], "after"]
    assert (tmp_path / "new/train.log").read_text() == 2 * TRAINING_OUTPUT


def test_a_failure_keeps_its_exit_code_and_shows_the_end_of_the_log(tmp_path):
    lines = "".join(f"print({number});" for number in range(30))
    code = f"{lines} raise SystemExit('the reason')"
    process = logged(tmp_path, sys.executable, "-c", code)
    out, err = process.communicate()
    assert process.returncode == 1 and not out
    first, *rest = err.splitlines()
    assert first.startswith("exit code 1") and "new/train.log" in first
    assert len(rest) == 20 and "the reason" in rest and "0" not in rest


def test_a_signal_reaches_the_training_and_its_exit_code_counts(tmp_path):
    """Megatron saves on SIGTERM with ``--exit-signal-handler``."""
    code = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('> checkpoint is saved', flush=True)\n"
        "    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('> checkpoint none', flush=True)\n"
        "time.sleep(60)"
    )
    process = logged(tmp_path, sys.executable, "-c", code)
    assert process.stdout.readline() == "> checkpoint none\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "> checkpoint is saved\n" and process.returncode == 7
