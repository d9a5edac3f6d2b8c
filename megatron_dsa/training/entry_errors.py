"""Endings of commands and trainings that cannot go on: a sentence on stderr and an exit code.

Errors that users can mend (:class:`~megatron_dsa.errors.DSAError`) and common bare errors of
Megatron end in a sentence; any other error keeps its traceback. ``--traceback`` on the command line
shows all tracebacks.
"""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_dsa.errors import TRACEBACK_FLAG, DSAError
from megatron_dsa.training.checkpoint_files import TRACKER, damage_in
from megatron_dsa.training.files.system_errors import sentence

#: Exit code of errors that the user has to mend.
USAGE = 2
#: Megatron's exit codes after a result that is not a number: save and rerun; give up.
_RERUN, _REJECTED = 16, 17


@dataclass(frozen=True)
class Ending:
    """A message and an exit code; ``traceback`` is printed before the message."""

    message: str
    code: int = USAGE
    traceback: bool = False


@contextlib.contextmanager
def told_in_a_sentence(argv: Sequence[str] | None = None) -> Iterator[None]:
    """End the process with the message and the exit code that :func:`explain` returns.

    Under a launcher, ranks that fail with the same message print it once, and torchrun's own
    summary shows it.

    Args:
        argv: the command line (default: ``sys.argv``); with ``--traceback`` errors pass through.

    Raises:
        SystemExit: in place of an error that :func:`explain` describes.
    """
    try:
        yield
    except SystemExit as leaving:
        machine = _rerun_state_machine()
        if leaving.code in (_RERUN, _REJECTED) and machine is not None:
            _say(_after_a_rejected_result(machine, leaving.code))
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if TRACEBACK_FLAG in (sys.argv if argv is None else argv):
            raise
        ending = explain(error)
        if ending is None:
            raise
        if ending.traceback:
            traceback.print_exception(error)
        _say(ending.message)
        raise SystemExit(ending.code) from None


def explain(error: BaseException) -> Ending | None:
    """Return how to end on an error, or ``None`` for one that needs its traceback."""
    if isinstance(error, DSAError):
        return Ending("\n".join([str(error) or "no message", *getattr(error, "__notes__", ())]))
    if isinstance(error, ImportError):
        return None  # the checks below also import
    if (message := _rejected_result(error)) is not None:
        return Ending(message, _REJECTED)
    passed = _functions(error)
    for functions, message_of in _KNOWN:
        if passed & functions and (message := message_of(error)) is not None:
            return Ending(message)
    if (message := _lost_rank(error)) is not None:
        return Ending(message, 1, traceback=True)
    message = _processes(error) or (sentence(error) if isinstance(error, OSError) else None)
    return None if message is None else Ending(message)


def _functions(error: BaseException) -> set[str]:
    """Return the names of the functions that an error came through."""
    return {frame.name for frame in traceback.extract_tb(error.__traceback__)}


def refused_by_megatron(error: BaseException) -> str:
    """Return what Megatron's check of the flags says, else the check itself."""
    if isinstance(error, ZeroDivisionError) or not str(error):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        check = linecache.getline(frame.filename, frame.lineno or 0).strip()
        if check == "assert args.hidden_size % args.num_attention_heads == 0":
            return (
                "--hidden-size must be divisible by --num-attention-heads, or --kv-channels be "
                "set: Megatron divides the two for it. DSA takes its head dims from --qk-head-dim "
                "and --v-head-dim: any hidden size will do with --kv-channels set to one of them"
            )
        file = frame.filename.rpartition("site-packages/")[2]
        return f"Megatron refuses these flags: {check} ({file}, line {frame.lineno})"
    sizes = re.match(
        r"eval_global_batch_size \((\d+)\) must be divisible by eval_micro_batch_size \((\d+)\) \* "
        r"data_parallel_size \((\d+)\)",
        str(error),
    )
    if sizes is not None:  # checked first, and derived from the flags of the training
        return (
            f"--global-batch-size (or --eval-global-batch-size) {sizes[1]} must be divisible by "
            f"--micro-batch-size {sizes[2]} times the number of data-parallel ranks, {sizes[3]}"
        )
    return f"Megatron refuses these flags: {error}"


def _refused_flags(error: BaseException) -> str | None:
    """Errors of Megatron's validation of the command line, and of its configurations."""
    is_check = isinstance(error, AssertionError | ValueError | ZeroDivisionError)
    return refused_by_megatron(error) if is_check else None


def _processes(error: BaseException) -> str | None:
    """Errors of processes that look for each other at the start."""
    from torch.distributed import DistNetworkError, DistStoreError, is_initialized

    if not isinstance(error, DistStoreError | DistNetworkError) or is_initialized():
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = ", ".join(f"{name}={os.environ.get(name, 'not set')}" for name in names)
    first = (str(error).splitlines() or [""])[0]
    if "EADDRINUSE" in str(error):
        reason = (
            "another process has MASTER_PORT: a second job on this machine, or a second process "
            "that was told to be rank 0. Give every job a port, and every process its RANK"
        )
    else:
        reason = (
            "not all processes of WORLD_SIZE have met at MASTER_ADDR:MASTER_PORT. Start as many as "
            "it says, each with its own RANK, where this address can be reached"
        )
    return f"{reason} ({told}): {first}"


#: What gloo and NCCL say where another rank has ended, or does not answer in time. NCCL's watchdog
#: may end the process first.
_LOST = re.compile(
    r"gloo/transport/.*(Connection (closed|reset) by peer|Timed out waiting|Broken pipe"
    r"|Connection refused|Socket closed)|Application timeout caused pair closure"
    r"|NCCL communicator was aborted|remote process exited"
    r"|Watchdog caught collective operation timeout"
)


def _lost_rank(error: BaseException) -> str | None:
    """Errors of a collective that another rank has left, or does not join."""
    from megatron_dsa.training.launching import world_size

    if not isinstance(error, RuntimeError) or world_size() < 2:
        return None
    if not _LOST.search(str(error)):
        return None
    return (
        f"another rank is lost or does not answer ({str(error).splitlines()[0]}): read the log of "
        "the rank that ended first. The same command resumes from the last checkpoint of --load "
        "(docs/guide/resume.md)"
    )


def _unreadable_checkpoint(error: BaseException) -> str | None:
    """Errors of damaged files, which sizes do not show, and of files for another run."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    if (damage := damage_in(error)) is not None:
        return (
            f"the checkpoint cannot be read: {damage}. Copy it again, or take an earlier one "
            "(docs/guide/resume.md)"
        )
    cause = _cause(error)
    if not isinstance(cause, CheckpointingException):
        return None
    return (
        f"the checkpoint of --load does not fit this run: {(str(cause).splitlines() or [''])[0]}: "
        "give the model, optimizer and parallel sizes of then; if the optimizer is at fault, start "
        "it anew with --no-load-optim"
    )


def _pickled_scales(error: BaseException) -> str | None:
    """Errors of transformer-engine on pickled states of delayed scaling."""
    variable = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    if not isinstance(error, RuntimeError) or variable not in str(error):
        return None
    return (
        "the checkpoint of --load was written with --fp8-recipe delayed, whose scaling factors are "
        f"pickled: set {variable}=1 in the environment to load them, if you trust the file, since "
        "a pickle may run code (docs/guide/fp8.md). Other recipes save no such state"
    )


def _cause(error: BaseException) -> BaseException:
    """Return the first error where torch collects the errors of all ranks."""
    failures = getattr(error, "failures", {})
    return next((each[0] for each in failures.values()), error)


def _failed_save(error: BaseException) -> str | None:
    """Errors of writing a checkpoint; torch's error of a full disk does not name the disk."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException | OSError):
        return None
    folder = _training_arguments().save
    free = shutil.disk_usage(folder).free / 2**20
    return (
        f"no checkpoint could be saved to {folder}, which has {free:.0f} MiB free: "
        f"{_cause(error)}. {TRACKER} still names the last whole one: make room, and start the "
        "same command again (docs/guide/resume.md)"
    )


def _optimizer_groups(error: BaseException) -> str:
    """Megatron finds the groups of an optimizer by their learning rates."""
    return (
        "the optimizer's state in the checkpoint of --load is of other learning rates (--lr, "
        "--min-lr and the like), by which Megatron finds it: give the ones of then, or start "
        f"the optimizer anew with --no-load-optim ({str(error).splitlines()[0]})"
    )


def _other_schedule(error: BaseException) -> str | None:
    """Errors of Megatron where flags and checkpoint have different schedules."""
    if not isinstance(error, AssertionError):
        return None
    return (
        "the learning-rate schedule in the checkpoint of --load is not that of the flags "
        f"({' '.join(str(error).split())}): give the --train-iters, --lr and the like of then, or "
        "--override-opt-param-scheduler to take these, or --use-checkpoint-opt-param-scheduler "
        "to keep those"
    )


#: Functions that an error came through -> returns the message for it, or ``None``.
_KNOWN: tuple[tuple[set[str], Callable[[BaseException], str | None]], ...] = (
    (
        {"validate_args", "core_transformer_config_from_args", "gpt_config_from_args"},
        _refused_flags,
    ),
    ({"load_checkpoint"}, _pickled_scales),
    ({"load_checkpoint", "prepare_loading", "export_hf"}, _unreadable_checkpoint),
    ({"save_checkpoint"}, _failed_save),
    ({"_filter_and_reorder_param_groups"}, _optimizer_groups),
    ({"_check_and_set"}, _other_schedule),
)


def _rejected_result(error: BaseException) -> str | None:
    """Megatron saves a state to examine, which fails where there is no ``--save``."""
    machine = _rerun_state_machine()
    if machine is None or machine.state.name != "WILL_RERUN_FROM_CHECKPOINT":
        return None
    if _training_arguments().save is not None:
        return None
    return _after_a_rejected_result(machine, _REJECTED)


def _rerun_state_machine():
    """Return what validates Megatron's results, or ``None`` where no training has begun."""
    machines = sys.modules.get("megatron.core.rerun_state_machine")
    variables = sys.modules.get("megatron.training.global_vars")
    if machines is None or variables is None or variables._GLOBAL_ARGS is None:
        return None
    return machines._GLOBAL_RERUN_STATE_MACHINE


def _training_arguments():
    from megatron.training.global_vars import get_args

    return get_args()


def _after_a_rejected_result(machine, code: int) -> str:
    """Return the result that was no number, its step, and the way on."""
    call = machine.failed_validation_call
    what = call.caller.message if call is not None else "a result of another rank was rejected"
    args = _training_arguments()
    if args.save is None:
        do = "Nothing was saved (no --save): start again from the last checkpoint, if there is one"
    elif code == _RERUN:
        do = (
            f"The state before this step was saved to {args.save} for a rerun on another GPU; if "
            "the weights are at fault every restart from it ends like this. Go back to an earlier "
            "checkpoint with --ckpt-step"
        )
    else:
        do = "Go back to an earlier checkpoint with --ckpt-step"
    return (
        f"step {args.curr_iteration + 1}: {what}. {do}, with other data or another --lr: "
        f"docs/guide/resume.md (exit code {code})"
    )


def _say(message: str) -> None:
    """Print a message on stderr, unless another rank has, and leave it for torchrun's summary."""
    from megatron_dsa.training.launching import this_rank, world_size

    with contextlib.suppress(OSError):  # its disk may be the full one
        sys.stdout.flush()
    if world_size() > 1:
        _leave_for_launcher(message)
        if not _is_first_to_say(message):
            return
        print(f"[rank {this_rank()}] ", end="", file=sys.stderr)
    print(f"error: {message}", file=sys.stderr, flush=True)


def _leave_for_launcher(message: str) -> None:
    """Write the file that torchrun's summary shows; without it the summary names a manual."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def _is_first_to_say(message: str) -> bool:
    """Return whether this rank is the first with the message, by the store of all ranks."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha1(message.encode()).hexdigest()
    try:
        return _store().add(f"megatron_dsa/said/{restart}/{digest}", 1) == 1
    except Exception:  # whatever is wrong with the store, the message must be seen
        return True


def _store():
    """Return the store of the process group, or torchrun's before there is one."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore, distributed_c10d

    if torch.distributed.is_initialized():
        return distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise LookupError("no launcher that keeps a store")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
