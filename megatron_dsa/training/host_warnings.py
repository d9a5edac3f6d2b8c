"""Silences warnings of Megatron and torch that no user of this package can act on.

Importing megatron-core without transformer-engine and Apex warns a dozen times before the first
useful line, and so does loading a checkpoint. Each entry below names one message by its beginning
and by the module or logger that gives it; everything else is shown as before.
"""

import logging
import re
import sys
import warnings

#: Warnings: beginning of the message, category, regular expression of the module it comes from.
WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # Megatron runs without these packages; a training prints which flags that calls for.
    ("Transformer Engine and Apex are not installed. Falling back", UserWarning, r"megatron\."),
    ("Apex is not installed. Falling back to Torch Norm", UserWarning, r"megatron\."),
    (
        "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0",
        UserWarning,
        r"megatron\.",
    ),
    # Parts of Megatron that are imported along and not used.
    ("MimoModelConfig is experimental", UserWarning, r"megatron\."),
    # A default of Megatron's own, for CUDA graphs.
    ("full scope is deprecated. Use empty cuda_graph_modules", UserWarning, r"megatron\."),
    # The compiler knows the file only.
    ("invalid escape sequence", SyntaxWarning, r".*[/\\]megatron[/\\]core[/\\]"),
    # On a machine without a GPU: Megatron asks for pinned memory, torch does without.
    ("'pin_memory' argument is set as true but no accelerator", UserWarning, r"torch\.utils\.data"),
    # Megatron's calls of torch's checkpoint functions.
    ("The argument order of load has been changed", UserWarning, r"torch\.distributed\."),
    (
        "torch.distributed is disabled, unavailable or uninitialized",
        UserWarning,
        r"torch\.distributed\.",
    ),
    # Attributed to any of the callers.
    ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning, ""),
)
#: Log records: logger, beginning of the message.
RECORDS: tuple[tuple[str, str], ...] = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    # Saves that are not asynchronous say it, too.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
    # What every run does, at the level of warnings.
    ("megatron.core.rerun_state_machine", "RerunStateMachine initialized in mode"),
    ("megatron.core.rerun_state_machine", "Result validation enabled"),
    ("megatron.core.rerun_state_machine", "Setting RerunStateMachine mode"),
)


def _is_shown(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(name == record.name and message.startswith(text) for name, text in RECORDS)


def silence_host_warnings() -> None:
    """Silence :data:`WARNINGS` and :data:`RECORDS`, for the rest of the process.

    To be called before Megatron is imported. Nothing is silenced where the user asks for warnings,
    by ``PYTHONWARNINGS=default`` or ``-W default`` (any action but ``ignore``). Filters that the
    program has set go first. A second call changes nothing.
    """
    if any(not option.startswith("i") for option in sys.warnoptions):
        return
    for beginning, category, module in WARNINGS:
        warnings.filterwarnings("ignore", re.escape(beginning), category, module, append=True)
    for logger, _ in RECORDS:
        logging.getLogger(logger).addFilter(_is_shown)
