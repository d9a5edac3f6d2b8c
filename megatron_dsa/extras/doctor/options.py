"""The options of the command and its help text; imports nothing heavy."""

import argparse

_SWITCH = ("off", "on", "both")

DESCRIPTION = """\
Compare every implementation that can run here with float64, at your shape (by default
DeepSeek-V3.2's), and time it. All forwards of sparse attention are combined with all backwards, all
index scores with all top-k; indexer losses are checked with their gradients.
"""

EPILOG = """\
exit codes, for CI:
  0  every combination that was checked is right, and a fused implementation was among them
  1  a combination is wrong: an error above the tolerance, a result that is not finite or breaks a
     rule for empty rows, invalid ids or ties, repeats that differ although the implementation is
     declared deterministic, or a crash. This holds for implementations that dispatch would not
     pick first, too: they are declared to work here. The table marks what dispatch would run.
  2  nothing wrong was found, but not enough was checked: no fused implementation can run here
     (say, there is no GPU; --allow-unfused accepts that), or memory ran out; also for wrong
     arguments
"not checked" in the report lists every implementation that was left out, with the reason. Without a
GPU, the torch implementations are checked on the CPU at a smaller shape, which the report names.
A kernel that hangs has to be stopped by a time limit of yours.
"""


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``"640,1152"``; for argparse."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values:
        raise argparse.ArgumentTypeError(f"must be whole numbers separated by commas, got {text!r}")
    return values


def number(text: str) -> int:
    """Parse a whole number; for argparse."""
    values = numbers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"must be one number, got {text!r}")
    return values[0]


def dims(text: str) -> tuple[int, int]:
    """Parse ``"576,512"``: query/key dim, value dim; for argparse."""
    values = numbers(text)
    if len(values) != 2 or values[1] > values[0]:
        raise argparse.ArgumentTypeError(
            "must be two numbers, the query/key dim and the value dim (a slice of the key, so not "
            f"larger), got {text!r}"
        )
    return values[0], values[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, and its help text, to ``parser``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--heads", type=numbers, default=(128,), help="query heads per rank, e.g. 16,32,64,128")
    add("--dims", type=dims, default=(576, 512), help="query/key dim, value dim (576,512)")
    add("--topk", type=numbers, default=(2048,), help="keys per query, e.g. 640,1152,2048")
    add("--seq", type=number, default=4096, help="keys (4096)")
    add("--index-heads", type=number, default=64, help="index heads (64)")
    add("--index-dim", type=number, default=128, help="dim of an index head (128)")
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of queries and keys (bf16)",
    )
    add("--sink", choices=_SWITCH, default="off", help="a learned sink per head (off)")
    add("--packed", choices=_SWITCH, default="off", help="several sequences per batch (off)")
    add("--rows", type=number, default=256, help="query rows that are compared with float64 (256)")
    add(
        "--tolerance",
        type=float,
        help="largest relative error (5e-3, fp32 1e-5; lse 1e-4, p_sum and loss 1e-3)",
    )
    add("--device", help="e.g. cuda, cuda:1 or cpu; default: a GPU if there is one")
    add("--json", action="store_true", help="print the report as JSON")
    add("--allow-unfused", action="store_true", help="exit with 0 without a fused implementation")
