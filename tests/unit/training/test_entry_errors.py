"""Commands and trainings end on the user's errors with a message and exit code 2."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsa import pretrain
from megatron_dsa.errors import ConfigError, FallbackError
from megatron_dsa.training.entry_errors import explain, report_errors
from tests.functional.launch import TINY, command_line
from tests.host import parsed
from tests.processes import python_path

ROOT = Path(__file__).resolve().parents[3]
TINY_FLAGS = command_line(TINY)
PICKLED = "Refusing to load: set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1."


def ended(error, argv=()):
    """Return the exit code after ``error``."""
    with pytest.raises(SystemExit) as leaving, report_errors(argv):
        raise error
    return leaving.value.code


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


@pytest.mark.parametrize("error", [ConfigError("--flag must be 1"), FallbackError("no kernel")])
def test_our_errors_are_a_sentence(error, alone, capsys):
    assert ended(error) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n" and not captured.out


def test_a_traceback_for_developers(capsys):
    with pytest.raises(ConfigError), report_errors(["program", "--traceback"]):
        raise ConfigError("wrong")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("error", [TypeError("bug"), KeyError("bug"), AssertionError("bug")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error), match="bug"), report_errors([]):
        raise error


def test_exit_codes_of_others_pass(capsys):
    for code in (None, 0, 1, 16):
        assert ended(SystemExit(code)) == code
    assert not capsys.readouterr().err


def test_ranks_say_it_once(monkeypatch, tmp_path, capsys):
    """torchrun reads every rank's message in a file."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    said = []
    for rank, message in enumerate(["all", "all", "only one"]):
        file = tmp_path / f"{rank}.json"
        here = {"RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(file)}
        for name, value in (shared | here).items():
            monkeypatch.setenv(name, value)
        assert ended(ConfigError(message)) == 2
        said.append(capsys.readouterr().err)
        assert json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] == message
    assert said == ["[rank 0] error: all\n", "", "[rank 2] error: only one\n"]
    # Without a store, print repeatedly rather than never.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert ended(ConfigError("all")) == 2
    assert capsys.readouterr().err == "[rank 2] error: all\n"


def refused(flags, monkeypatch):
    with pytest.raises((AssertionError, ValueError)) as raised:
        parsed(flags, 1, monkeypatch)
    return explain(raised.value)


@pytest.mark.parametrize(
    "changes, says",
    [
        (["--hidden-size", "30"], "--hidden-size must be divisible by --num-attention-heads, or"),
        (["--save", "there"], "assert args.save_interval is not None (megatron/training/argum"),
        (
            ["--global-batch-size", "3"],
            "--global-batch-size (or --eval-global-batch-size) 3 must be",
        ),
    ],
)
def test_checks_of_megatron(changes, says, monkeypatch):
    ending = refused([*TINY_FLAGS, *changes], monkeypatch)
    assert ending.code == 2 and says in ending.message


def test_hidden_size_that_is_no_multiple_of_heads(monkeypatch):
    args = parsed([*TINY_FLAGS, "--hidden-size", "30", "--kv-channels", "8"], 1, monkeypatch)
    assert pretrain.model_config_from_args(args).transformer.hidden_size == 30


@pytest.mark.parametrize(
    ("kind", "folder"),
    [("HuggingFaceTokenizer", "nowhere/there"), ("HuggingFaceTokenizer", None),
     ("SentencePieceTokenizer", "/nowhere")],
)  # fmt: skip
def test_a_tokenizer_that_is_not_there(kind, folder, monkeypatch):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = parsed([*TINY_FLAGS, "--tokenizer-type", kind], 1, monkeypatch)
    args.tokenizer_model = folder
    with pytest.raises((AssertionError, OSError, ValueError)) as raised:
        build_tokenizer(args)
    ending = explain(raised.value)
    assert ending.code == 2 and "a folder that exists" in ending.message


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "--wandb-project needs the package wandb: pip install"),
        ({"wandb_exp_name": ""}, "--wandb-project needs --wandb-exp-name, and --wandb-save-dir"),
    ],
)
def test_wandb_that_cannot_run(settings, says, monkeypatch):
    from megatron.training.global_vars import _set_wandb_writer

    monkeypatch.setitem(sys.modules, "wandb", None)
    values = {"wandb_project": "a", "wandb_exp_name": "b", "rank": 0, "world_size": 1}
    with pytest.raises((ModuleNotFoundError, ValueError)) as raised:
        _set_wandb_writer(SimpleNamespace(**values | settings))
    ending = explain(raised.value)
    assert ending.code == 2 and ending.message.startswith(says)


def init_process_group(*arguments, **settings):
    """Imitate the origin of rendezvous errors."""
    return TCPStore("localhost", *arguments, is_master=True, **settings)


def test_processes_that_do_not_come(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistStoreError) as raised:
        init_process_group(0, world_size=2, timeout=timedelta(seconds=1))
    message = explain(raised.value).message
    assert message.startswith("not all processes of WORLD_SIZE have met")
    assert "(RANK=0, WORLD_SIZE=2, " in message


def test_two_processes_of_rank_0():
    first = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(DistNetworkError) as raised:
        init_process_group(first.port, wait_for_workers=False)
    assert "a second process that was told to be rank 0" in explain(raised.value).message
    with pytest.raises(DistNetworkError) as raised:
        TCPStore("localhost", first.port, is_master=True, wait_for_workers=False)
    assert explain(raised.value) is None  # during training it has other causes


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] "


@pytest.mark.parametrize(
    "text",
    [
        GLOO + "Timed out waiting 8000ms for send operation to complete",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
        "Application timeout caused pair closure",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_rank_that_is_lost(text, alone, monkeypatch, capsys):
    """The traceback must show the rank's position; a restart fixes it, so the code is 1."""
    assert explain(RuntimeError(text)) is None  # there is no other rank
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ended(RuntimeError(f"{text}\nmore")) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and f"does not answer ({text})" in said
    assert "The same command resumes" in said
    assert explain(RuntimeError("CUDA error: an illegal memory access")) is None  # a bug


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("load_checkpoint", EOFError("Ran out"), "cannot be read: EOFError: Ran out. Copy it"),
        ("load_checkpoint", EOFError(), "cannot be read: EOFError: "),
        ("load_checkpoint", RuntimeError("PytorchStreamReader failed"), "cannot be read: Runt"),
        ("load_checkpoint", CheckpointingException("flattened"), "not fit this run: flattened: "),
        ("load_checkpoint", RuntimeError(PICKLED), "--fp8-recipe delayed, whose"),
        ("load_checkpoint", RuntimeError(PICKLED), "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"),
        (
            "save_checkpoint",
            CheckpointException("write", {0: (RuntimeError("Worker failure"), None)}),
            "MiB free: Worker failure. ",
        ),
    ],
)  # fmt: skip
def test_checkpoints(function, error, says, rejected, tmp_path):
    rejected(str(tmp_path))
    with pytest.raises(type(error)) as raised:
        raise error
    message = explain(raised.value, function).message
    assert says in message and "\n" not in message
    if function == "save_checkpoint":
        assert message.startswith(f"no checkpoint could be saved to {tmp_path}, which has ")


def test_an_optimizer_of_another_learning_rate():
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    group = {"max_lr": 1e-3, "params": []}
    with pytest.raises(ValueError) as raised:
        MegatronOptimizer._filter_and_reorder_param_groups([group], [group | {"max_lr": 1.0}])
    message = explain(raised.value).message
    assert "other learning rates" in message and "--no-load-optim" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        (True, "no tokenizer can be read from /nowhere/tokenizer: give a folder that exists, with"),
        (False, "need the package transformers: pip install 'megatron-dsa[data]'"),
    ],
)
def test_tokenizers(installed, says, monkeypatch):
    from megatron.core.tokenizers.text.libraries import huggingface_tokenizer
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    if installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.delattr(huggingface_tokenizer, "AutoTokenizer", raising=False)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/nowhere/tokenizer"]
    args = parsed([*TINY_FLAGS, *flags], 1, monkeypatch)
    with pytest.raises(ValueError) as raised:
        build_tokenizer(args)
    ending = explain(raised.value)
    assert ending.code == 2 and says in ending.message and "\n" not in ending.message


def test_wandb_that_is_not_installed(monkeypatch):
    from megatron.training import global_vars

    monkeypatch.setitem(sys.modules, "wandb", None)
    args = SimpleNamespace(wandb_project="p", wandb_exp_name="e", rank=0, world_size=1)
    with pytest.raises(ModuleNotFoundError) as raised:
        global_vars._set_wandb_writer(args)
    ending = explain(raised.value)
    assert ending.code == 2 and "pip install 'megatron-dsa[wandb]'" in ending.message


@pytest.fixture
def rejected(monkeypatch):
    """Return Megatron's machine after a non-finite step; ``rejected(save)``."""
    from megatron.core import rerun_state_machine
    from megatron.training import global_vars

    def reject(save):
        caller = SimpleNamespace(message="found NaN in local forward loss calculation")
        machine = SimpleNamespace(
            state=rerun_state_machine.RerunState.WILL_RERUN_FROM_CHECKPOINT,
            failed_validation_call=SimpleNamespace(caller=caller),
        )
        monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
        args = SimpleNamespace(save=save, curr_iteration=41)
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)

    return reject


def test_not_a_number_without_save(rejected, alone, capsys):
    """Megatron's attempt to save is a TypeError."""
    rejected(None)
    assert ended(TypeError("expected str, bytes or os.PathLike object, not NoneType")) == 17
    said = capsys.readouterr().err
    assert said.startswith("error: step 42: found NaN in local forward loss calculation. Nothing")
    assert "docs/guide/resume.md" in said and said.count("\n") == 1


def test_not_a_number_with_save(rejected, alone, capsys):
    rejected("there")
    assert ended(SystemExit(16)) == 16
    said = capsys.readouterr().err
    assert "step 42: found NaN" in said and "saved to there" in said and "--ckpt-step" in said
    with pytest.raises(TypeError), report_errors([]):
        raise TypeError("another error while it saves")


@pytest.mark.parametrize(
    "command, says",
    [
        (["import-hf", "--input", ".", "--output", "x"], "config.json is missing"),
        (["prepare-data", "--output", "x", "--input", "nowhere"], "nowhere: No such file"),
        (["prepare-data", "--output", "x", "--input", "."], ".: Is a directory: check the path"),
        (["prepare-data", "--output", "x/"], "--output x/ must end in the name that files begin"),
        (["prepare-data", "--output", f"{__file__}/x"], "Not a directory: check the path"),
        (["report", "nowhere"], "nowhere is no folder"),
        (["prepare-data", "--output", "x", "--input", sys.executable], "must be a text file"),
        (["prepare-data", "--output", "x", "--tokenizer", "nowhere"], "nowhere is no folder: give"),
        (
            ["prepare-data", "--output", "x", "--tokenizer", "tests"],
            "no tokenizer can be read from tests",
        ),
        (["prepare-data", "--output", "x", "--workers", "0"], "--workers must be"),
        (["import-hf", "--input", "x", "--output", "x", "--shard-gb", "nan"], "--shard-gb must be"),
        (["import-hf", "--input", "x", "--output", "x", "--shard-gb", "inf"], "--shard-gb must be"),
        (["info", "--muon", "glm-5", "--json"], "--json and --muon must not be given together"),
        (["info", "--support-table", "--json"], "must not be given together"),
        (["info", "--muon-per-head", "all"], "--muon-per-head all needs --muon"),
        (["info", "--muon", "nosuch"], "--muon nosuch must be a released model; available: v3.2"),
        (
            ["generate", "--load", "x", "--prompt", "a", "--temperature", "inf"],
            "--temperature must be finite",
        ),
    ],
)
def test_commands(command, says, monkeypatch, alone, capsys):
    from megatron_dsa.__main__ import main

    monkeypatch.setattr(sys, "argv", ["megatron_dsa", *command])
    with pytest.raises(SystemExit) as leaving:
        main()
    said = capsys.readouterr().err
    assert leaving.value.code == 2 and said.startswith("error: ") and says in said
    monkeypatch.setattr(sys, "argv", ["megatron_dsa", *command, "--traceback"])
    with pytest.raises((ValueError, OSError)):
        main()


def test_a_training_as_a_user_starts_it(tmp_path):
    command = [sys.executable, "-m", "megatron_dsa.pretrain", *TINY_FLAGS, "--csa-window-size", "3"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("INFO:")]
    (error,) = errors
    assert error.startswith("error: --csa-window-size 3 has a meaning only with --csa-compress-ra")
