"""Default flags for this machine and package, which user flags override."""

import importlib.util

from megatron_dsa.config.fields import given_values
from megatron_dsa.patches import cpu_host
from megatron_dsa.training.launching import this_rank
from megatron_dsa.versions import why_not_transformer_engine

#: Attention needs no masks and uses this package's rope.
ALWAYS = ["--no-create-attention-mask-in-dataloader", "--no-rope-fusion"]
WITHOUT_TRANSFORMER_ENGINE = [
    "--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion",
]  # fmt: skip
#: Apex's kernel for fused gradient accumulation.
GRADIENT_ACCUMULATION_KERNEL = "fused_weight_gradient_mlp_cuda"
#: Delayed scaling starts at 1, where E5M2 rounds gradients below 2**-17 to 0.
LOSS_SCALE = ["--loss-scale", "65536"]

#: Pack conversations and weight them by tokens.
SFT = [
    "--dataloader-inter-document-masking", "--calculate-per-token-loss",
    "--dsa-cp-layout", "zigzag_rows",
]  # fmt: skip


def preset_flags(argv: list[str], planning: bool = False) -> None:
    """Insert this machine's flags before the user's, which win.

    ``planning`` assumes a GPU.
    """
    flags, reasons = list(ALWAYS), []
    no_gpu = cpu_host.needed()
    local = _last_value(argv, "--transformer-impl") == "local"
    if (reason := why_not_transformer_engine(has_gpu=not no_gpu)) is not None:
        reasons.append(reason)
        flags += WITHOUT_TRANSFORMER_ENGINE
        local = True
    if local and (no_gpu or importlib.util.find_spec(GRADIENT_ACCUMULATION_KERNEL) is None):
        reasons.append("no Apex")
        flags.append("--no-gradient-accumulation-fusion")
    fp8 = _last_value(argv, "--fp8-format") is not None
    delayed = _last_value(argv, "--fp8-recipe") in (None, "delayed")
    if fp8 and delayed and "--fp16" not in argv:  # fp16 training already scales the loss
        reasons.append("delayed scaling")
        flags += LOSS_SCALE
    if "--sft" in argv:
        reasons.append("--sft")
        flags += SFT
    if importlib.util.find_spec("one_logger") is None:
        flags.append("--no-one-logger")
    if no_gpu and not planning:
        reasons.append("no GPU (running on the CPU over gloo)")
        flags += cpu_host.FLAGS
    argv[1:1] = flags
    if reasons and this_rank() == 0:
        print(f"> {', '.join(reasons)}: preset flags {' '.join(flags)}")


def _last_value(argv: list[str], flag: str) -> str | None:
    return next(reversed(given_values(argv, flag)), None)
