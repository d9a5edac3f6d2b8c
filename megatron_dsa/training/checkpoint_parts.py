"""Parts of a checkpoint's model that this run would drop, or compute in another way."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_dsa.errors import require

#: End of a parameter's name -> flag that builds it, and whether a run has that flag.
_PARTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "hc_attn_fn": ("--hc-mult above 1", lambda args: args.hc_mult > 1),
    "hc_head_fn": ("--hc-collapse learned", lambda args: args.hc_collapse == "learned"),
    "linear_gate.weight": ("--dsa-output-gate", lambda args: args.dsa_output_gate),
    "attn_sink": (
        "--softmax-type learnable",
        lambda args: args.softmax_type == "learnable" or bool(args.csa_compress_ratios),
    ),
}


def check_parts(args: argparse.Namespace, keys: Iterable[str], saved: Any, directory: Path) -> None:
    """Check that this run's model has the parts of a checkpoint, and the bound of its KDA gates.

    ``keys``: entries of the checkpoint; ``saved``: its arguments, or ``None``.

    Raises:
        ConfigError: names the flag that differs.
    """
    keys = [key for key in keys if not key.startswith("optimizer")]
    for end, (flag, builds) in _PARTS.items():
        require(
            not any(key.endswith(f".{end}") for key in keys) or builds(args),
            f"checkpoint {directory} has parameters {end}, which this run would leave out: give "
            f"{flag}, as in its training",
        )
    bound = getattr(saved, "kda_gate_lower_bound", None)
    if bound is None or getattr(saved, "linear_attention_freq", None) is None:
        return
    require(
        args.kda_gate_lower_bound == bound,
        f"--kda-gate-lower-bound must be {bound}, as in checkpoint {directory}, got "
        f"{args.kda_gate_lower_bound}: its KDA layers were trained with that bound",
    )
