"""Runs the doctor on the CPU, with implementations that are wrong on purpose."""

import json

from megatron_dsa.extras import doctor
from megatron_dsa.extras.cli import build_parser

FORWARD, BACKWARD, TEACHER = (
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
)
#: Small enough for milliseconds; fp32, so that a right implementation is far from the tolerance.
SMALL = (
    "--device cpu --heads 4 --dims 24,16 --topk 16 --seq 80 --rows 20 --index-heads 3 "
    "--index-dim 8 --dtype fp32"
)


def parse(text):
    return build_parser().parse_args(["doctor", *text.split()])


def run(capsys, text=SMALL):
    """Run the command; return its exit code and its report as data."""
    code = doctor.run(parse(f"{text} --json"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return code, json.loads(capsys.readouterr().out, parse_constant=refuse)


def verdicts(data, name="made_up"):
    """Results by the implementations in them, of those that contain ``name``."""
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
    """A wrapper that lets ``change(call, result list)`` spoil what torch returns."""

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
