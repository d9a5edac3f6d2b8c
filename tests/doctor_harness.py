"""The doctor on the CPU, with planted wrong implementations."""

import json

from megatron_dsa.extras import doctor
from megatron_dsa.extras.cli import build_parser

FORWARD, BACKWARD, TEACHER = (
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
)
#: Milliseconds; fp32 is far below the tolerance.
SMALL = (
    "--device cpu --heads 4 --dims 24,16 --topk 16 --seq 80 --rows 20 --index-heads 3 "
    "--index-dim 8 --dtype fp32"
)


def parse(text):
    return build_parser().parse_args(["doctor", *text.split()])


def run(capsys, text=SMALL):
    """Run the command; return its exit code and report."""
    code = doctor.run(parse(f"{text} --json"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return code, json.loads(capsys.readouterr().out, parse_constant=refuse)


def verdicts(data, name="made_up"):
    """Return results whose implementations contain ``name``, by implementation."""
    found = {}
    for result in data["results"]:
        names = tuple(result["implementations"].values())
        if name in names:
            found[result["check"], *names] = result
    return found


def others_are_ok(data):
    return all(
        result["ok"]
        for result in data["results"]
        if "made_up" not in result["implementations"].values()
    )


def unchanged(original):
    return original


def altered(change):
    """Return a wrapper that applies ``change(call, result list)`` to torch's results."""

    def wrap(original):
        def implementation(call, *args):
            result = list(original(call, *args))
            change(call, result)
            return tuple(result)

        return implementation

    return wrap


def scale(position, factor):
    def change(call, result):
        if result[position] is not None:
            result[position] = result[position] * factor

    return change
