"""The launch scripts: their flags are valid and describe the released models."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from megatron_dsa.config import CSATransformerConfig
from megatron_dsa.huggingface.config_json import check_model, parse_config
from megatron_dsa.presets import PRESETS
from tests.cases.launch_scripts import EXAMPLES, MODEL, TRAINING, V4, launch, launched, logs
from tests.host import parsed

#: config.json of released models, as far as it says what weights mean.
MOE = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
DEEPSEEK_V32 = MOE | {
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GLM_5 = MOE | {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "num_hidden_layers": 78,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}


def configured(flags, world, monkeypatch):
    """Return the transformer configuration and the arguments that flags describe."""
    from megatron_dsa.pretrain import model_config_from_args

    # Grouped expert GEMMs are refused without a GPU; a Hopper GPU is what the scripts are for.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    args = parsed(flags, world, monkeypatch)
    if args.padded_vocab_size is None:
        args.padded_vocab_size = 1024  # the tokenizer's
    assert args.eval_interval  # Megatron divides by it, whether or not there is a validation
    return model_config_from_args(args).transformer, args


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_v4_script(name, tmp_path, monkeypatch):
    launcher, flags, _ = launched(f"v4_{name}.sh", tmp_path, V4)
    assert launcher[:2] == ["-m", "torch.distributed.run"] and "--nproc-per-node" in launcher
    config, _ = configured(flags, 8, monkeypatch)
    assert isinstance(config, CSATransformerConfig)
    for field, value in PRESETS[f"deepseek-v4-{name}"].items():
        assert getattr(config, field) == value, field
    assert (config.rotary_base, config.csa_compress_rotary_base) == (10000, 12345)
    assert (config.rotary_scaling_factor, config.original_max_position_embeddings) == (7, 1024)
    assert config.rope_type == "yarn" and config.num_moe_experts == 16


@pytest.mark.parametrize(
    "script, preset, released, variables",
    [
        ("v3_2.sh", "deepseek-v3.2", DEEPSEEK_V32, {}),
        ("v3_2.sh", "deepseek-v3.2", DEEPSEEK_V32, {"STAGE": "warmup"}),
        ("v3_2.sh", "deepseek-v3.2", DEEPSEEK_V32, {"STAGE": "warmup", "RECOMPUTE": "full"}),
        ("v3_2.sh", "deepseek-v3.2", DEEPSEEK_V32, {"SEQ_LENGTH": "131072", "CP": "4"}),
        ("glm_5.sh", "glm-5", GLM_5, {}),
    ],
    ids=["v3.2", "v3.2 warm-up", "v3.2 warm-up recomputed", "v3.2 at 128k", "glm-5"],
)
def test_script_of_released_model(script, preset, released, variables, tmp_path, monkeypatch):
    """The flags describe the weights: what ``--dsa-load-hf`` demands of its ``config.json``."""
    launcher, flags, _ = launched(script, tmp_path, TRAINING | variables)
    assert launcher[2:4] == ["--nnodes", "32"]
    config, args = configured(flags, 256, monkeypatch)
    check_model(parse_config(released), config)
    for field, value in PRESETS[preset].items():
        assert getattr(config, field) == value, field
    assert args.padded_vocab_size == released["vocab_size"]
    assert args.mtp_num_layers == released["num_nextn_predict_layers"]
    assert args.seq_length == int(variables.get("SEQ_LENGTH", 4096))
    assert args.context_parallel_size == int(variables.get("CP", 1))
    assert config.dsa.stage == variables.get("STAGE", "sparse")
    usual = None if config.dsa.stage == "warmup" else "selective"
    assert args.recompute_granularity == variables.get("RECOMPUTE", usual)
    stages = config.pipeline_model_parallel_layout.layout
    assert len(stages) == args.pipeline_model_parallel_size == 8


def test_index_sharing_of_later_glm(tmp_path, monkeypatch):
    """The command in the head of glm_5.sh, with a layout as it asks for."""
    sharing = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    released = GLM_5 | sharing | {"rope_parameters": {"rope_theta": 8000000}}
    flags = ("--dsa-indexer-topk-freq", "4", "--dsa-indexer-skip-topk-offset", "3")
    _, flags, _ = launched("glm_5.sh", tmp_path, TRAINING | {"ROTARY_BASE": "8000000"}, *flags)
    config, _ = configured(flags, 256, monkeypatch)
    check_model(parse_config(released), config)


@pytest.mark.parametrize("script", ["v3_2.sh", "glm_5.sh", "v4_flash.sh", "v4_pro.sh"])
def test_dry_run_needs_no_launcher(script, tmp_path):
    """Neither data nor tokenizer nor GPUs: one process that is told how many there would be."""
    variables = MODEL if script.startswith("v4") else {}
    launcher, flags, world = launched(script, tmp_path, variables | {"NODES": "4"}, "--dsa-dry-run")
    assert launcher == ["-m"] and flags[-1] == "--dsa-dry-run" and world == "32"


def test_slurm(tmp_path):
    """Every node gets its number, all the same address and port; variables are taken along."""
    for name, text in {
        "srun": 'shift\nSLURM_NODEID=3 exec "$@"',  # the one flag, then what a task runs
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
    """Return the variables that a script asks for, which it must do before anything else."""
    done = launch(script, folder, variables, *arguments)
    first, *lines = done.stderr.splitlines()
    assert first == f"{script}: set these variables, which have no default:"
    assert done.returncode == 2 and not done.stdout
    meanings = dict(line.strip().split(": ", 1) for line in lines)
    assert all(meanings.values())
    return list(meanings)


@pytest.mark.parametrize("variable", V4)
def test_variables_have_no_default(variable, tmp_path):
    """Nothing that public sources do not agree on, or do not give, is made up."""
    others = {name: value for name, value in V4.items() if name != variable}
    assert unset_variables("v4_flash.sh", tmp_path, others) == [variable]


@pytest.mark.parametrize("script", ["v3_2.sh", "glm_5.sh", "v4_flash.sh", "v4_pro.sh"])
def test_all_unset_variables_are_named_at_once(script, tmp_path):
    of_model = MODEL if script.startswith("v4") else {}
    assert unset_variables(script, tmp_path, {}) == [*of_model, *TRAINING]


@pytest.mark.parametrize("script", ["v4_flash.sh", "v4_pro.sh"])
def test_v4_is_planned_without_variables(script, tmp_path):
    """The attention; the rope values it assumes and what is left out are said."""
    done = launch(script, tmp_path, {"LR": ""}, "--dsa-dry-run")
    assert done.returncode == 0, done.stderr
    flags = json.loads(done.stdout)[0]
    assert "--dsa-dry-run-attention-only" in flags and flags[-1] == "--dsa-dry-run"
    assert "" not in flags and not {"--num-experts", "--moe-ffn-hidden-size"} & {*flags}
    assumed, left_out = done.stderr.splitlines()
    rope = ["ROTARY_BASE", "COMPRESS_ROTARY_BASE", "YARN_FACTOR", "YARN_ORIGINAL_LENGTH"]
    assert [word.split("=")[0] for word in assumed.split(": ")[-1].split()] == rope
    assert left_out.split(": ")[-1].split() == [name for name in MODEL if name not in rope]
    # Values that are known are taken.
    done = launch(script, tmp_path, {"YARN_FACTOR": "7"}, "--dsa-dry-run")
    flags = json.loads(done.stdout)[0]
    assert flags[flags.index("--rotary-scaling-factor") + 1] == "7"
    assert "YARN_FACTOR" not in done.stderr
    assert "--dsa-dry-run-attention-only" not in launched(script, tmp_path, V4)[1]


def test_experts_that_are_half_known_are_not_planned(tmp_path):
    """They would be left out although something was said about them."""
    known = {"NUM_EXPERTS": "16", "EXPERT_SIZE": "64"}
    asked = ["MOE_LAYER_FREQ", "EXPERTS_PER_TOKEN", "SHARED_EXPERT_SIZE"]
    done = launch("v4_flash.sh", tmp_path, known, "--dsa-dry-run")
    assert done.returncode == 2 and not done.stdout
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()[2:]] == asked


def test_more_flags_of_several_lines(tmp_path):
    variables = {"MORE_FLAGS": "--seed 3\n--dsa-dry-run\n--name *"}
    launcher, flags, _ = launched("v3_2.sh", tmp_path, variables, "last")
    assert launcher == ["-m"]
    assert flags[-6:] == ["--seed", "3", "--dsa-dry-run", "--name", "*", "last"]


def test_unknown_recompute_is_refused(tmp_path):
    done = launch("v3_2.sh", tmp_path, TRAINING | {"RECOMPUTE": "most"})
    assert done.returncode == 2 and "got most" in done.stderr


TRAINING_OUTPUT = """\
a line of Megatron
 [2026-01-01 00:00:00] iteration        1/       5 | lm loss: 5.7E+00 |
WARNING:megatron_dsa.dispatch:megatron_dsa indexer_topk: torch (cudnn: too old)
> megatron_dsa runs:
>   operation     implementation  reason
>   indexer_topk  torch           cudnn: too old
 validation loss at iteration 5 | lm loss value: 4.0E+00 |
another line
"""


def logged(folder, *command):
    """Start the function of ``log.sh`` that runs a command; the log is ``folder/new/train.log``."""
    script = f'set -euo pipefail; source {EXAMPLES}/log.sh; logged new/train.log "$@"; echo after'
    return subprocess.Popen(
        ["bash", "-c", script, "script", *command],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_terminal_shows_training_lines_and_the_log_everything(tmp_path):
    for _ in range(2):  # a run that is resumed appends
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
    """Megatron saves a checkpoint on SIGTERM with ``--exit-signal-handler``."""
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


def test_a_stage_that_fails_ends_the_script(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *pretrain*) echo "the reason"; exit 5 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [EXAMPLES / "train_small.sh"],
        env=os.environ | {"PYTHON": str(python), "RUN_DIR": str(tmp_path / "run")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5 and done.stdout == "== stage dense, up to step 150\n"
    assert "the reason" in done.stderr and "stage dense failed" in done.stderr
