"""Errors that end a command or training with a message on stderr and an exit code."""

import contextlib
import hashlib
import json
import linecache
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_dsa.errors import TRACEBACK_FLAG, DSAError
from megatron_dsa.training.checkpoint_files import TRACKER, damage_in, first_failure
from megatron_dsa.training.files.system_errors import sentence
from megatron_dsa.training.launching import this_rank, world_size

#: Exit code of errors that the user can fix.
USAGE = 2
#: Megatron's exit codes after a rejected result: state saved for a rerun, or not.
_RERUN, _REJECTED = 16, 17


class Ending(NamedTuple):
    """Message and exit code; ``traceback`` prints the traceback first."""

    message: str
    code: int = USAGE
    traceback: bool = False


class Known(NamedTuple):
    """An error of Megatron or torch, with a message for users.

    Attributes:
        through: functions, one of them in the traceback; "" matches any.
        kinds: class names of the error or its cause.
        says: message, with fields ``{error}``, ``{launch}``, ``{executable}``, ``{save}`` and
            groups of ``text``.
        text: regular expression to find in the error's text.
    """

    through: str
    kinds: str
    says: str
    text: str = "()"
    code: int = USAGE
    traceback: bool = False


_FLAGS = "validate_args core_transformer_config_from_args gpt_config_from_args"
_TOKENIZER = "build_tokenizer hugging_face_tokens"
_LOAD = "load_checkpoint prepare_loading export_hf"
#: Known errors; the first match applies.
KNOWN = (
    Known(
        _FLAGS,
        "AssertionError",
        "--hidden-size must be divisible by --num-attention-heads, or --kv-channels be set: "
        "Megatron divides the two for it. DSA takes its head dims from --qk-head-dim and "
        "--v-head-dim: any hidden size will do with --kv-channels set to one of them",
        r"assert args\.hidden_size % args\.num_attention_heads == 0",
    ),
    Known(
        _FLAGS,
        "AssertionError",
        "--global-batch-size (or --eval-global-batch-size) {1} must be divisible by "
        "--micro-batch-size {2} times the number of data-parallel ranks, {3}",
        r"eval_global_batch_size \((\d+)\) must be divisible by eval_micro_batch_size \((\d+)\) \* "
        r"data_parallel_size \((\d+)\)",
    ),
    Known(
        _FLAGS,
        "AssertionError ValueError ZeroDivisionError",
        "Megatron refuses these flags: {error}",
    ),
    Known(
        _TOKENIZER,
        "ValueError",
        "Hugging Face tokenizers need the package transformers: pip install 'megatron-dsa[data]'",
        "name 'AutoTokenizer' is not defined",
    ),
    Known(
        _TOKENIZER,
        "ValueError",
        "no tokenizer can be read from {1}: give a folder that exists, with tokenizer.json and "
        "tokenizer_config.json, in --tokenizer-model (prepare-data: --tokenizer). transformers "
        "says: {2}",
        r"Unable to instantiate HuggingFace AutoTokenizer for (.+?)\. Exception: (.*)",
    ),
    Known(
        "_set_wandb_writer",
        "ModuleNotFoundError",
        "--wandb-project needs the package wandb: pip install 'megatron-dsa[wandb]', or leave the "
        "flag out",
        "wandb",
    ),
    Known(
        "load_checkpoint",
        "RuntimeError",
        "the checkpoint of --load was written with --fp8-recipe delayed, whose scaling factors are "
        "pickled: set {1}=1 in the environment to load them, if you trust the file, since a pickle "
        "may run code (docs/guide/fp8.md). Other recipes save no such state",
        "(NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE)",
    ),
    Known(
        _LOAD,
        "CheckpointingException",
        "the checkpoint of --load does not fit this run: {error}: give the model, optimizer and "
        "parallel sizes of then; if the optimizer is at fault, start it anew with --no-load-optim",
    ),
    Known(
        "save_checkpoint",
        "CheckpointException OSError",
        "no checkpoint could be saved to {save}: {error}. " + TRACKER + " still names the last "
        "whole one: make room, and start the same command again (docs/guide/resume.md)",
    ),
    Known(
        "_filter_and_reorder_param_groups",
        "Exception",
        "the optimizer's state in the checkpoint of --load is of other learning rates (--lr, "
        "--min-lr and the like), by which Megatron finds it: give the ones of then, or start the "
        "optimizer anew with --no-load-optim ({error})",
    ),
    Known(
        "_check_and_set",
        "AssertionError",
        "the learning-rate schedule in the checkpoint of --load is another than that of the flags "
        "({error}): give the --train-iters, --lr and the like of then, or "
        "--override-opt-param-scheduler to take these, or --use-checkpoint-opt-param-scheduler to "
        "keep those",
    ),
    Known(
        "build_tokenizer",
        "AssertionError OSError ValueError",
        "no tokenizer can be read by --tokenizer-type and --tokenizer-model: the model must be a "
        "folder that exists, with tokenizer.json and tokenizer_config.json for "
        "HuggingFaceTokenizer, or the file that the type needs ({error})",
    ),
    Known(
        "_set_wandb_writer",
        "ValueError TypeError",
        "--wandb-project needs --wandb-exp-name, and --wandb-save-dir unless there is --save: add "
        "them, or drop it ({error})",
    ),
    Known(
        "init_process_group",
        "DistStoreError DistNetworkError",
        "another process has MASTER_PORT: a second job on this machine, or a second process that "
        "was told to be rank 0. Give every job a port, and every process its RANK ({launch}): "
        "{error}",
        "EADDRINUSE",
    ),
    Known(
        "init_process_group",
        "DistStoreError DistNetworkError",
        "not all processes of WORLD_SIZE have met at MASTER_ADDR:MASTER_PORT. Start as many as it "
        "says, each with its own RANK, where this address can be reached ({launch}): {error}",
    ),
    Known(
        "",
        "RuntimeError",
        "another rank is lost or does not answer ({error}): read the log of the rank that ended "
        "first. The same command resumes from the last checkpoint of --load (docs/guide/resume.md)",
        # Errors of gloo and NCCL; NCCL's watchdog may end the process first.
        r"gloo/transport/.*(Connection (closed|reset) by peer|Timed out waiting|Broken pipe"
        r"|Connection refused|Socket closed)|Application timeout caused pair closure"
        r"|NCCL communicator was aborted|remote process exited"
        r"|Watchdog caught collective operation timeout",
        code=1,
        traceback=True,
    ),
)


@contextlib.contextmanager
def report_errors(argv: Sequence[str] | None = None) -> Iterator[None]:
    """Exit with the message and code of :func:`explain`.

    Ranks that fail with the same message print it once; torchrun's summary includes it.

    Args:
        argv: the command line, by default ``sys.argv``; ``--traceback`` lets errors pass through.
    """
    try:
        yield
    except SystemExit as leaving:
        if leaving.code in (_RERUN, _REJECTED) and (machine := _rerun_machine()) is not None:
            _say(_after_a_rejected_result(machine, leaving.code))
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if TRACEBACK_FLAG in (sys.argv if argv is None else argv):
            raise
        ending = explain(error)
        if ending is None:
            raise
        if ending.traceback:
            traceback.print_exception(error)
        _say(ending.message)
        raise SystemExit(ending.code) from None


def explain(error: BaseException, *functions: str) -> Ending | None:
    """Return an error's message and exit code, or ``None`` if the error is unexpected.

    Args:
        functions: names to add to the functions of the traceback.
    """
    if isinstance(error, DSAError):
        return Ending("\n".join([str(error) or "no message", *getattr(error, "__notes__", ())]))
    machine = _rerun_machine()
    rejected = machine is not None and machine.state.name == "WILL_RERUN_FROM_CHECKPOINT"
    if rejected and _training_arguments().save is None:
        return Ending(_after_a_rejected_result(machine, _REJECTED), _REJECTED)
    cause = first_failure(error)
    kinds = {kind.__name__ for each in (error, cause) for kind in type(each).__mro__}
    frames = traceback.extract_tb(error.__traceback__)
    passed = {*functions, *(frame.name for frame in frames)}
    if passed & set(_LOAD.split()) and (damage := damage_in(error)) is not None:
        return Ending(
            f"the checkpoint cannot be read: {damage}. Copy it again, or take an earlier one "
            "(docs/guide/resume.md)"
        )
    said = "" if isinstance(cause, ZeroDivisionError) else str(cause)
    if not said and frames:
        code = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
        file = re.sub(".*/(?:site-packages/|(?=megatron/))", "", frames[-1].filename)
        said = f"{code} ({file}, line {frames[-1].lineno})"
    for known in KNOWN:
        found = re.search(known.text, said)
        # Known errors without ``through`` concern other ranks.
        fits = passed & set(known.through.split()) if known.through else world_size() > 1
        if found and fits and kinds & set(known.kinds.split()):
            whole = known.through in (_FLAGS, "_check_and_set", "save_checkpoint")
            lines = said.splitlines() or [""]
            fields = {"error": " ".join(lines) if whole else lines[0], "launch": _launch()}
            fields["executable"] = sys.executable
            fields["save"] = _folder() if "{save}" in known.says else ""
            message = known.says.format(found[0], *found.groups(), **fields)
            return Ending(message, known.code, known.traceback)
    described = sentence(error) if isinstance(error, OSError) else None
    return None if described is None else Ending(described)


def _launch() -> str:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in names)


def _folder() -> str:
    """Describe the folder of ``--save`` and its free space, which torch omits."""
    folder = _training_arguments().save
    return f"{folder}, which has {shutil.disk_usage(folder).free / 2**20:.0f} MiB free"


def _training_arguments() -> Any:
    return sys.modules["megatron.training.global_vars"].get_args()


def _rerun_machine() -> Any:
    machines = sys.modules.get("megatron.core.rerun_state_machine")
    variables = sys.modules.get("megatron.training.global_vars")
    if machines is None or variables is None or variables._GLOBAL_ARGS is None:
        return None
    return machines._GLOBAL_RERUN_STATE_MACHINE


def _after_a_rejected_result(machine: Any, code: int) -> str:
    call = machine.failed_validation_call
    result = call.caller.message if call is not None else "a result of another rank was rejected"
    args = _training_arguments()
    way = "Go back to an earlier checkpoint with --ckpt-step"
    if args.save is None:
        way = "Nothing was saved (no --save): start again from the last checkpoint, if there is one"
    elif code == _RERUN:
        way = (
            f"The state before this step was saved to {args.save} for a rerun on another GPU; if "
            f"the weights are at fault every restart from it ends like this. {way}"
        )
    return (
        f"step {args.curr_iteration + 1}: {result}. {way}, with other data or another --lr: "
        f"docs/guide/resume.md (exit code {code})"
    )


def _say(message: str) -> None:
    """Print a message on one rank, and write it to torchrun's summary."""
    with contextlib.suppress(OSError):  # the disk may be full
        sys.stdout.flush()
    if world_size() > 1:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError), open(path, "w") as file:
                json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        if not _is_first_to_say(message):
            return
        print(f"[rank {this_rank()}] ", end="", file=sys.stderr)
    print(f"error: {message}", file=sys.stderr, flush=True)


def _is_first_to_say(message: str) -> bool:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha1(message.encode()).hexdigest()
    try:
        return _store().add(f"megatron_dsa/said/{restart}/{digest}", 1) == 1
    except Exception:  # without a store, every rank prints the message
        return True


def _store():
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore, distributed_c10d

    if torch.distributed.is_initialized():
        return distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LookupError("no launcher that keeps a store")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
