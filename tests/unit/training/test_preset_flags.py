"""Preset flags: commands of guide and scripts start with every optional package."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsa import versions
from megatron_dsa.errors import ConfigError
from megatron_dsa.patches import cpu_host
from megatron_dsa.training import preset_flags as presets
from tests.host import parsed, start

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = REPOSITORY / "examples"
GUIDE = "docs/guide/start.md"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[vgt]*_*.sh"))
#: Required variables of large models' scripts, with made-up values.
VARIABLES = {
    "DATA_PATH": "data",
    "TOKENIZER": "tokenizer",
    "CHECKPOINTS": "checkpoints",
    "TRAIN_STEPS": "10",
    "GLOBAL_BATCH": "256",
    "LR": "1e-4",
    "ROTARY_BASE": "10000",
    "COMPRESS_ROTARY_BASE": "12345",
    "YARN_FACTOR": "7",
    "YARN_ORIGINAL_LENGTH": "1024",
    "MOE_LAYER_FREQ": "1",
    "NUM_EXPERTS": "32",
    "EXPERTS_PER_TOKEN": "2",
    "EXPERT_SIZE": "64",
    "SHARED_EXPERT_SIZE": "64",
}


def guide_block(folder):
    """Write the commands of the guide's section on the command line to a script."""
    text = (REPOSITORY / GUIDE).read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(python -m megatron_dsa prepare-data.*?)```", text, re.S)
    script = folder / "guide.sh"
    script.write_text(block)
    return ["bash", script]


def trainings(command, folder):
    """Run a script without its programs; return the flags of each training that it starts."""
    calls = folder / "calls"
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"open({str(calls)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        # The small examples read progress there.
        "flags = dict(zip(sys.argv, sys.argv[1:], strict=False))\n"
        "if '--save' in flags and '--train-iters' in flags:\n"
        "    os.makedirs(flags['--save'], exist_ok=True)\n"
        "    file = flags['--save'] + '/latest_checkpointed_iteration.txt'\n"
        "    open(file, 'w').write(flags['--train-iters'])\n"
    )
    program.chmod(0o755)
    (folder / "torchrun").symlink_to(program)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "RUN_DIR": str(folder / "run")}
    paths["CHECKPOINTS"] = str(folder / "checkpoints")
    environment = VARIABLES | paths | {"PYTHON": str(program)}
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    argvs = [json.loads(line) for line in calls.read_text().splitlines()]
    entry = "megatron_dsa.pretrain"
    return [argv[argv.index(entry) + 1 :] for argv in argvs if entry in argv]


@pytest.fixture
def with_transformer_engine(monkeypatch):
    """Imitate a Hopper GPU and transformer-engine without Apex."""
    start()
    monkeypatch.setattr(presets, "why_not_transformer_engine", lambda has_gpu: None)
    monkeypatch.setattr(cpu_host, "needed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize("script", [GUIDE, *SCRIPTS])
def test_commands_start_with_transformer_engine(
    script, tmp_path, monkeypatch, with_transformer_engine
):
    """Megatron's defaults would reject rope of kind 'rope', and need Apex's kernel."""
    from megatron_dsa.pretrain import model_config_from_args

    command = guide_block(tmp_path) if script == GUIDE else [EXAMPLES / script]
    found = trainings(command, tmp_path)
    assert found
    for flags in found:
        args = parsed(flags, 512 if "--use-distributed-optimizer" in flags else 1, monkeypatch)
        args.padded_vocab_size = args.padded_vocab_size or 1024  # the tokenizer's
        config = model_config_from_args(args).transformer
        assert config.transformer_impl == "transformer_engine"
        assert not config.apply_rope_fusion and config.gradient_accumulation_fusion


@pytest.mark.parametrize(
    ("words", "engine", "apex", "fused"),
    [
        ([], True, False, True),
        ([], False, False, False),
        ([], False, True, True),
        (["--transformer-impl", "local"], True, False, False),
        (["--transformer-impl=local"], True, False, False),
        (["--transformer-impl", "local"], True, True, True),
        (["--transformer-impl", "local", "--transformer-impl=transformer_engine"], True, False,
         True),
        (["--transformer-impl"], True, False, True),
    ],
)  # fmt: skip
def test_gradient_accumulation_is_fused_where_linears_can(words, engine, apex, fused, monkeypatch):
    """transformer-engine's need no kernel of Apex, Megatron's do."""
    reason = None if engine else "no engine"
    monkeypatch.setattr(presets, "why_not_transformer_engine", lambda has_gpu: reason)
    monkeypatch.setattr(cpu_host, "needed", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: apex or None)
    argv = ["pretrain", *words]
    presets.preset_flags(argv)
    assert ("--no-gradient-accumulation-fusion" not in argv) == fused


@pytest.mark.parametrize(
    ("words", "lifted"),
    [
        (["--fp8-format", "hybrid"], True),  # Megatron's default recipe
        (["--fp8-format=hybrid", "--fp8-recipe", "delayed"], True),
        (["--fp8-format", "hybrid", "--fp8-recipe=tensorwise"], False),
        (["--fp8-recipe", "delayed"], False),
        (["--fp8-format", "hybrid", "--fp16"], False),
        ([], False),
    ],
)
def test_delayed_scaling_gets_a_loss_scale(words, lifted, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    argv = ["pretrain", *words, "--loss-scale", "2"]
    presets.preset_flags(argv)
    assert (argv.count("--loss-scale") == 2) == lifted
    assert argv[-2:] == ["--loss-scale", "2"]  # the user's wins
    assert ("delayed scaling" in capsys.readouterr().out) == lifted


def test_presets_go_in_front_and_are_announced(capsys, monkeypatch):
    start()
    monkeypatch.setattr(presets, "why_not_transformer_engine", lambda has_gpu: "no engine")
    monkeypatch.setattr(cpu_host, "needed", lambda: True)
    monkeypatch.setenv("RANK", "0")
    argv = ["pretrain", "--num-workers", "3"]
    presets.preset_flags(argv)
    assert argv[0] == "pretrain" and argv[-2:] == ["--num-workers", "3"]
    out = capsys.readouterr().out
    assert "no engine" in out and "no GPU" in out and "--transformer-impl local" in out
    # With all packages, only this package's own flags.
    monkeypatch.setattr(presets, "why_not_transformer_engine", lambda has_gpu: None)
    monkeypatch.setattr(cpu_host, "needed", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    argv = ["pretrain"]
    presets.preset_flags(argv)
    assert argv == ["pretrain", *presets.ALWAYS] and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "version, failure, has_gpu, reason",
    [
        (None, "not asked", True, "no transformer-engine"),
        ("2.20", "cannot be imported", True, "cannot be imported"),
        ("2.20", "not asked", False, "transformer-engine needs a GPU"),  # hidden by then
        ("2.20", None, True, None),
    ],
)
def test_transformer_engine_is_used_where_it_can_run(
    version, failure, has_gpu, reason, monkeypatch
):
    monkeypatch.setattr(versions, "installed_version", lambda _name: version)
    monkeypatch.setattr(versions, "_failed_import_of_transformer_engine", lambda: failure)
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    assert versions.why_not_transformer_engine(has_gpu) == reason


def test_megatron_does_not_see_transformer_engine_without_a_gpu():
    """Its optimizers, norms and gradient clipping would use any installed package."""
    code = (
        "import sys, types\n"
        "from importlib.machinery import ModuleSpec\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert not name.startswith('transformer_engine'), name\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from megatron_dsa.patches import cpu_host\n"
        "cpu_host.activate()\n"
        "import megatron.core.optimizer.clip_grads\n"
        "import megatron.core.models.gpt.gpt_layer_specs\n"
        "import megatron.core.models.mimo\n"
    )
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_transformer_engine_that_megatron_has_imported_is_refused(monkeypatch):
    """Without a GPU no layer of it can be built."""
    from megatron_dsa import pretrain

    activated = []
    monkeypatch.setattr(cpu_host, "needed", lambda: True)
    monkeypatch.setattr(cpu_host, "activate", lambda: activated.append(True))
    monkeypatch.setattr(pretrain, "check_launch", lambda: None)
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)
    with pytest.raises(ConfigError, match="before Megatron is imported"):
        pretrain.prepare_host(["train.py"])
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    pretrain.prepare_host(["train.py"])
    assert activated == [True]


def test_untested_versions_are_told(monkeypatch):
    monkeypatch.setattr(versions, "host_version", lambda: "0.19.2")
    monkeypatch.setattr(versions, "installed_version", lambda _name: "2.99.1+cu999")
    assert [line.split(":")[0] for line in versions.untested_versions()] == ["torch 2.99.1+cu999"]
    monkeypatch.setattr(versions, "installed_version", lambda _name: "2.13.0")
    assert versions.untested_versions() == []


def test_help_prints(capsys, monkeypatch):
    """megatron-core 0.19 has a bare percent sign in a help text."""
    start()
    from megatron.training import arguments

    from megatron_dsa.arguments import add_dsa_arguments

    monkeypatch.setattr(sys, "argv", ["pretrain", "--help"])
    with pytest.raises(SystemExit) as end:
        arguments.parse_args(add_dsa_arguments)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--dsa-indexer-topk" in out and "--moe-paged-stash-buffer-size-factor-cuda" in out
    usage, _, flags = out.partition("\n\n")
    assert usage.startswith("usage:") and "--" not in usage
    ours = flags.index("megatron_dsa:\n  --attention-backend BACKEND")
    assert ours < flags.index("--num-layers")


def test_help_on_our_flags_alone(capsys, monkeypatch):
    start()
    from megatron.training import arguments

    from megatron_dsa.arguments import add_dsa_arguments

    monkeypatch.setattr(sys, "argv", ["pretrain", "--help-dsa"])
    with pytest.raises(SystemExit) as end:
        arguments.parse_args(add_dsa_arguments)
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--csa-compress-ratios" in out and "--dsa-stage" in out
    assert "--num-layers" not in out and "--dsa-forward-impl" not in out
    shown = set(re.findall(r"^  (--[\w-]+)", out, re.M))
    assert len(shown) > 30 and not shown & {
        f"--{word}" for word in ("lr", "seed", "bf16", "fp8-format")
    }
    assert len(out.splitlines()) < 4 * len(shown)
